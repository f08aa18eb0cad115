"""The links between the supervisors of a run while it runs."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from jshard.train.launch.deadlines import Deadlines
from jshard.train.launch.endings import Ending, from_message, to_message
from jshard.train.launch.link import Link, close_all


class Peers:
    """The other supervisors, as one of them sees them: process 0 is linked to all, the others to process 0.

    Messages: {"beat": 1, "step": n}, {"ended": ending of the sender's worker}, and from process 0
    {"verdict": the ending that was the cause}.

    Args:
        process_id: whose view this is.
        links: by process id.
        hosts: the machines of those, by process id.
        deadlines: of the run.
    """

    def __init__(
        self, *, process_id: int, links: Mapping[int, Link], hosts: Mapping[int, str], deadlines: Deadlines
    ) -> None:
        self.process_id = process_id
        self.verdict: Ending | None = None
        self._links = dict(links)
        self._hosts = dict(hosts)
        self._deadlines = deadlines
        self._steps: dict[int, int] = {}
        self._over: set[int] = set()

    @property
    def decides(self) -> bool:
        """Whether it is for this supervisor to say which process was lost: for that of process 0, if it is there."""
        return self.process_id == 0 or not self._links

    def poll(self, step: int | None) -> list[Ending]:
        """Sends a sign of life, and returns the bad endings heard of since the last call.

        Args:
            step: the last one that our worker reported, for the others to know.
        """
        found = []
        for process, link in list(self._links.items()):
            ending = self._hear(process, link)
            if ending is not None and process not in self._over:
                self._over.add(process)
                if not ending.good:
                    found.append(ending)
            # The link of one whose worker has ended stays: it waits for the verdict.
            if link.closed or link.silent_s > self._deadlines.peer_s:
                del self._links[process]
                link.close()
            else:
                link.beat(self._deadlines.beat_s, step=step)
        return found

    def tell(self, ending: Ending) -> None:
        """Tells the others how our worker ended."""
        self._send({"ended": to_message(ending)})

    def announce(self, verdict: Ending) -> None:
        """Tells the others which process was lost; process 0 does."""
        self._send({"verdict": to_message(verdict)})

    def close(self) -> None:
        """Ends the links, when the others have read what was sent."""
        close_all(self._links.values())
        self._links.clear()

    def _send(self, message: dict) -> None:
        for link in self._links.values():
            link.send(message)

    def _hear(self, process: int, link: Link) -> Ending | None:
        ending = None
        for message in link.receive():
            if type(message.get("step")) is int:
                self._steps[process] = message["step"]
            if self.process_id != 0 and self.verdict is None:
                self.verdict = from_message(message.get("verdict"))
            told = from_message(message.get("ended"))
            if told is not None and told.process == process:
                ending = told
        if ending is not None:
            return ending
        silent_s = link.silent_s if link.silent_s > self._deadlines.peer_s else None
        if silent_s is None and not link.closed:
            return None
        host, step = self._hosts.get(process, "unknown"), self._steps.get(process)
        return Ending(process=process, host=host, silent_s=silent_s, step=step)


def hostname() -> str:
    """This machine's name, short enough for a message."""
    return socket.gethostname()[:255]
