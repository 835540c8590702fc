"""Which steps of the Trainer's loops may be replayed, and what runs in place of their Python."""
