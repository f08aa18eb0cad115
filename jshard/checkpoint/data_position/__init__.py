"""Positions in the data: stored as text, and compared with the data that they are restored into."""
