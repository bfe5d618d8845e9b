"""Requests that arrive at random, through two real engines: ours beside the stock connectors.

The same Poisson arrivals are served in several modes on engines without HTTP and a model that
takes time but computes nothing (`bench.engines`); the connectors, the scheduler and NIXL are real.
The modes take turns, and the whole is repeated, so that a machine that drifts decides nothing: a
ratio is the median of the ratios within each round.
"""
