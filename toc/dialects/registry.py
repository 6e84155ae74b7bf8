"""Every dialect, by the name of its option."""

from __future__ import annotations

from toc.dialects.delay_task import DelayTask
from toc.dialects.lmstfy import Lmstfy
from toc.dialects.lmstfy_admin import LmstfyAdmin
from toc.dialects.port import Dialect
from toc.dialects.redis_delayed import RedisDelayed
from toc.dialects.youzan import Youzan

DIALECTS: dict[str, type[Dialect]] = {
    one.name: one for one in (Youzan, RedisDelayed, DelayTask, Lmstfy, LmstfyAdmin)
}
