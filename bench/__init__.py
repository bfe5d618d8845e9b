"""Benchmarks, the demo, and the harness that starts real servers for them and for the tests."""
