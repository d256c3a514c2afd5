"""The adapters in a stable order, sorted anew only when one was added: listings of 10,000 stay cheap."""

from __future__ import annotations

from adapters.registry.view import RegistryView
from adapters.types import AdapterEntry


class Catalogue:
    """The view's adapters by (base, name)."""

    def __init__(self, view: RegistryView) -> None:
        self._view = view
        self._order: list[int] = []
        self._entries: list[AdapterEntry] = []
        self._generation = -1

    @property
    def generation(self) -> int:
        return self._view.generation

    def entries(self) -> list[AdapterEntry]:
        """All adapters in order, as they are now. The list is not to be changed."""
        if self._generation != self._view.generation:
            there = tuple(self._view.adapters())
            if len(there) != len(self._order):  # the view keeps each adapter in its place: they come, and never go
                self._order = sorted(range(len(there)), key=lambda at: (there[at].base, there[at].name))
            self._entries = [there[at] for at in self._order]
            self._generation = self._view.generation
        return self._entries
