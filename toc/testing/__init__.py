"""Test an application's deadlines: without a server, and with time that the test moves.

::

    def test_an_unpaid_order_is_closed(toc):
        order = place_order()
        toc.assert_submitted("order.close", biz_id=order.id, due_in="30m")
        toc.advance("30m")
        assert order.closed

``toc`` is a fixture of the pytest plugin that comes with this package; ``with Toc() as toc`` is the same for
others.
"""

from toc.testing.kit import Toc
from toc.testing.running import InjectedFailure, KitError, NeedsAwait, TooManyCalls

__all__ = ["InjectedFailure", "KitError", "NeedsAwait", "Toc", "TooManyCalls"]
