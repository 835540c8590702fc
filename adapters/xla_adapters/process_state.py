"""What a step may change that belongs to the process, and not to a tensor."""

from __future__ import annotations

import torch

from xla_adapters.backend import Backend


class ProcessState:
    """Seeds, whether gradients are recorded, and what autocast does, as it all is when this is made.

    A `with torch.no_grad()` or `torch.autocast()` leaves it behind where Ctrl-C interrupts its exit.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.seed = backend.seed()
        self._host_seed = torch.get_rng_state()
        self._gradients = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("xla")
        self._dtype = torch.get_autocast_dtype("xla")
        self._nesting = _autocast_nesting()

    def put_back(self) -> None:
        """Puts it back. Weights that autocast has cast meanwhile are forgotten, being values of a discarded graph."""
        # The device's seed too: left as it is, it would be a value of that graph.
        self._backend.set_seed(self.seed)
        torch.set_rng_state(self._host_seed)
        torch.set_grad_enabled(self._gradients)
        torch.set_autocast_enabled("xla", self._autocast)
        torch.set_autocast_dtype("xla", self._dtype)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
