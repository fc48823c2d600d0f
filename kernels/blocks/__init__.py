"""Building blocks that the scans share: registers, features, tiles, products, state, synchronisation."""
