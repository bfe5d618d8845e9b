"""Engines in processes of their own, over real NIXL."""
