"""Conversations of other systems as sessions, and sessions for other systems."""
