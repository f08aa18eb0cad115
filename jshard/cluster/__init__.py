"""Planning for a cluster you do not have: its devices, its compiler, an estimate of its step."""
