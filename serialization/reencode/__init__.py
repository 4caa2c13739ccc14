"""Stored states made anew with other dtypes, codecs, chunks or windows, or fewer tokens."""
