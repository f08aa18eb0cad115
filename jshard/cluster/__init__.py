"""Planning for a cluster that is not there: its devices, its compiler, an estimate of its step."""
