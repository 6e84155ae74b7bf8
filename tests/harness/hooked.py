"""A system that sends webhooks to receivers on loopback."""

from collections.abc import Sequence

from cryptography.fernet import Fernet

from harness.receiver import Receiver
from harness.system import DaemonProcess, System
from toc import Settings, TaskStatus, TimeoutCenter, Topic
from toc.model.task import TaskRow
from toc.model.topic import Delivery, TopicType


class Hooked:
    """A system with a topic whose tasks are sent, and targets for receivers."""

    def __init__(
        self, system: System, *receivers: Receiver, allow: Sequence[str] = (), **policies: object
    ) -> None:
        self.system = system
        allow = ["127.0.0.1", *(one.origin for one in receivers), *allow]
        key = Fernet.generate_key().decode()
        given = system.settings.model_dump() | {"webhook_allow": allow, "secret_key": [key]}
        self.center = TimeoutCenter(Settings(**given))
        self.env = {"TOC_WEBHOOK_ALLOW": ",".join(allow), "TOC_SECRET_KEY": key}
        given = {"retries": 3, "backoff_base": 0.05, **policies}
        self.center.store.topics.create(
            Topic("hook", 500, 4, TopicType.INSTANT, delivery=Delivery.WEBHOOK, **given)
        )

    def start(self, **more: object) -> DaemonProcess:
        """Start a worker that sends."""
        given = {"env": self.env, "app": None, "webhooks": True, "processes": 1, **more}
        return self.system.start(**given)  # type: ignore[arg-type]

    def submit(self, biz_id: int | str = 1, **more: object) -> int:
        return self.center.submit("hook", biz_id=biz_id, **more)  # type: ignore[arg-type]

    def ended(self, job_id: int, seconds: float = 20) -> TaskRow:
        """The row of a task, once it has ended."""
        system = self.system
        system.wait(lambda: system.row(job_id).status != TaskStatus.PENDING, f"{job_id} has ended", seconds)
        return system.row(job_id)

    def history(self, job_id: int) -> list[tuple[int | None, str]]:
        return [(one.status, one.error) for one in self.center.store.history(job_id)]
