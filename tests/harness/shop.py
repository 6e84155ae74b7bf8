"""The application of a shop whose invoices cannot be sent: what the pictures of the console show."""

from toc import Task, TimeoutCenter

center = TimeoutCenter()


@center.handler("order.close")
@center.handler("parcel.confirm")
@center.handler("member.remind")
def does_its_work(_task: Task) -> None:
    """What a shop does when a deadline has come."""


@center.handler("invoice.dun")
def dun(_task: Task) -> None:
    """Send a reminder of an invoice, by a provider that is away."""
    raise ConnectionError("mail provider: connection refused")
