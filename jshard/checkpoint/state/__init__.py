"""The stored form of a state: leaves by path, their values and their checksums."""
