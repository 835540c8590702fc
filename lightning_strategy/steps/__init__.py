"""The compiled steps of the Trainer's loops: where each begins and ends."""
