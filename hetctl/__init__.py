"""hetctl: one large language model on a cluster that no single communication library can span."""

__version__ = "0.1.0"
