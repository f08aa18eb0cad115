"""The grid: models on clusters, compiled by jshard and as plain Flax under GSPMD."""
