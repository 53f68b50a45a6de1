"""Streams: take the samples of an iterable dataset one by one, and lose none of them where reading fails.

A stream yields samples, or lists of samples that are mappings. A sample that was taken stays *unsettled* until the
round that it belongs to has been read on all ranks; if the round fails, its samples come again. Unsettled samples are
kept pickled, because a stream may make its next sample in the same memory.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from flexcp.data.reading.samples import pickled


class FlatStream:
    """The samples of a stream, one by one, after those of ``rest``, which were read from it earlier."""

    def __init__(self, stream: Any, rest: Iterable[Any] = ()) -> None:
        self._items, self._rest = iter(stream), deque(rest)
        self._unsettled: list[bytes] = []
        self.failure: str | None = None
        """The error with which the stream did not give its next item, or None."""
        self._one_shot = self._items is stream
        self._in_the_middle = False

    def take(self, where: str) -> tuple[Any, bytes] | None:
        """Return the next sample and the same pickled, or None after the last; ``where`` names it in errors.

        Raise ValueError if the sample cannot be pickled, and RuntimeError if the stream ends after it has failed.
        """
        if not self._fill():
            return None
        packed = pickled(self._rest[0], where)
        self._unsettled.append(packed)
        return self._rest.popleft(), packed

    def skip(self) -> bool:
        """Leave out the next sample; return False if there is none. Raise RuntimeError as :meth:`take` does."""
        there_is = self._fill()
        if there_is:
            self._rest.popleft()
        return there_is

    def _fill(self) -> bool:
        """Read an item of the stream if no sample is left of the last one; return False at the end of the stream.

        A generator that has raised ends, which must not be taken for the end of the samples: raise RuntimeError.
        """
        if self._rest:
            return True
        self._in_the_middle = True
        try:
            item = next(self._items)
        except StopIteration:
            if self.failure is None:
                self._in_the_middle = False
                return False
            raise RuntimeError(
                f"the stream ended after it had failed ({self.failure}), so its other samples are not known; make "
                "the Loader again with a new stream, and load the state that this Loader's state_dict() gives"
            ) from None
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        self.failure = None
        several = isinstance(item, list | tuple) and len(item) > 0 and isinstance(item[0], Mapping)
        self._rest.extend(item if several else [item])
        return True

    def check_begins_again(self) -> None:
        """Raise ValueError if the stream is an iterator that gave some of its samples and cannot give them again.

        One that has ended passes: it has nothing left that would be taken for its beginning.
        """
        if self._one_shot and self._in_the_middle:
            raise ValueError(
                "the dataset is an iterator that gave samples already, and it cannot begin again; make the iterator "
                "and the Loader again, and load the state into that Loader"
            )

    def settle(self) -> None:
        """Forget the samples that were taken: they have been read on all ranks."""
        self._unsettled.clear()

    def untake(self) -> None:
        """Put unsettled samples back, so that they are taken again."""
        self._rest.extendleft(pickle.loads(packed) for packed in reversed(self._unsettled))
        self._unsettled.clear()

    @property
    def rest(self) -> list[Any]:
        """The samples that were read from the stream and are not settled."""
        return [*(pickle.loads(packed) for packed in self._unsettled), *self._rest]
