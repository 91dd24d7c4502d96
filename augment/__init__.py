"""Data: samplers, policies and generators, and the gate that judges synthetic data.

Nothing is public here yet; the layout is in `docs/architecture.md`.
"""

__all__: list[str] = []

__distribution__ = "lightning-keras-ext"
