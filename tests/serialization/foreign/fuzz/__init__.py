"""A small fuzzer for every reader of foreign files: mutations of good files, and laws for all of them."""
