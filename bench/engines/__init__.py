"""Real vLLM engines without HTTP, on a model that takes time but computes nothing.

Engines live in child processes of a driver (`bench.engines.pair`) that speaks to them over pipes:
on a small machine the cores are left to the engines, and what is measured is vLLM's scheduler, the
connectors and NIXL.
"""
