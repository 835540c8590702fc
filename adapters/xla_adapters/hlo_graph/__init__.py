"""HLO modules as graphs that can be compared, taken apart and written again."""
