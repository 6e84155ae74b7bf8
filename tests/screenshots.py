"""The pictures of the console in docs/images. ``make screenshots`` runs a shop's deadlines and takes them.

The recording is of an operator who finds why tasks died and has them run again.
"""

import io
import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from harness.chromium import Visitor, chromium
from harness.gateway import Gateway
from harness.system import System, small_system
from PIL import Image
from playwright.sync_api import ViewportSize

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask, Topic

IMAGES = Path(__file__).parents[1] / "docs/images"
WINDOW = ViewportSize(width=1280, height=860)
COLORS = 128
FRAME_MS = 1800
COUNTED = """
    () => !document.body.innerText.includes("\\n0 starts")
        && [...document.querySelectorAll(".picture[data-values]")]
        .every(one => one.dataset.values.split(",").reduce((sum, n) => sum + Number(n), 0) > 1000)
"""
"""Those who sweep the tables have counted what comes due, and workers what has started."""
MOST_BYTES = 500_000
"""Of the recording."""


@contextmanager
def shop() -> Iterator[Gateway]:
    """A shop's deadlines on real servers, with some that died."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toc-")))
        redis, mariadb = RedisServer(directory / "redis"), MariaDB(directory / "mariadb")
        for server in (redis, mariadb):
            server.start()
            stack.callback(server.stop)
        system = small_system(directory, redis, mariadb, "toc_")
        stack.callback(system.stop)
        for number, name in enumerate(("order.close", "parcel.confirm", "member.remind", "invoice.dun"), 1):
            system.center.store.topics.create(Topic(name, number, 8, retries=2, backoff_base=0.1))
        system.center.catalog.refresh()
        fill(system)  # before those start who count what comes due
        gateway = Gateway(system, host="gateway-1")
        stack.callback(gateway.stop)
        gateway.make_token("maria", "operate", "read")
        for number in (1, 2):
            system.start(f"worker-{number}", app="harness.shop:center")
        due = datetime.now(UTC) + timedelta(seconds=2)
        soon = [NewTask("invoice.dun", f"invoice-{9_000 + number}", action_time=due) for number in range(60)]
        soon += [
            NewTask(
                "order.close", f"order-{30_000 + number}", action_time=due + timedelta(seconds=number / 30)
            )
            for number in range(1000)
        ]
        jobs = system.center.submit_many(soon)
        system.wait(lambda: not system.pending(jobs), "those due at once", 60)
        yield gateway


def fill(system: System) -> None:
    """Tasks as a shop has them: many within the hour, and each evening."""
    chance = random.Random(1)
    now = datetime.now(UTC)
    tasks = []
    for number in range(4000):
        day = 24 * chance.randrange(1, 7)
        hours = chance.choice([chance.uniform(0.1, 1), day + chance.gauss(0, 3), chance.uniform(1, 168)])
        due = now + timedelta(hours=hours)
        tasks.append(NewTask("order.close", f"order-{40_000 + number}", action_time=due))
    for number in range(1500):
        due = now + timedelta(hours=chance.uniform(2, 168))
        tasks.append(NewTask("parcel.confirm", f"parcel-{70_000 + number}", action_time=due))
    system.center.submit_many(tasks)


def take(visitor: Visitor) -> Image.Image:
    """What is on the screen."""
    visitor.page.wait_for_timeout(300)
    return Image.open(io.BytesIO(visitor.page.screenshot())).convert("RGB")


def write(name: str, picture: Image.Image) -> None:
    """Keep a picture in few colours."""
    path = IMAGES / f"console-{name}.png"
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size)


def main() -> None:
    """Take all pictures."""
    IMAGES.mkdir(exist_ok=True)
    with shop() as gateway, chromium() as browser:
        maria = Visitor(browser, gateway, "maria", viewport=WINDOW)
        maria.go("")
        maria.wait(COUNTED)
        frames = [take(maria)]
        maria.page.set_viewport_size({**WINDOW, "height": 1480})
        write("overview", take(maria))
        maria.page.set_viewport_size(WINDOW)
        for step in ("Dead", "60", "Redrive all that match", "Show what would change"):
            maria.press(maria.page.locator("a, button", has_text=re.compile(f"^{step}$")).first)
            frames.append(take(maria))
            if step == "60":
                write("dead", frames[-1])
        maria.page.get_by_label("To confirm").fill("invoice.dun")
        frames.append(take(maria))
        maria.press(maria.page.get_by_role("button", name="Redrive all that match"))
        frames.append(take(maria))
        maria.wait("document.body.innerText.includes('pending again')")
        frames.append(take(maria))
        path = IMAGES / "console.webp"
        smaller = [one.resize((WINDOW["width"] * 3 // 4, WINDOW["height"] * 3 // 4)) for one in frames]
        smaller[0].save(
            path, save_all=True, append_images=smaller[1:], duration=FRAME_MS, loop=0, quality=60, method=6
        )
        print(path, path.stat().st_size)
        assert path.stat().st_size < MOST_BYTES
        maria.go(f"/tasks/{gateway.system.center.find(biz_id='invoice-9000')[0].job_id}")
        write("task", take(maria))
        maria.go("/workers")
        write("workers", take(maria))


if __name__ == "__main__":
    main()
