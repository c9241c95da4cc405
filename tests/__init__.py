"""Tests. `tests.support` holds the case generators and float64 oracles that all suites share."""
