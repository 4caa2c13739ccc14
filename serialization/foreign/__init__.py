"""State files of other systems, bytes to values and back. Nothing here knows an engine, session or store."""
