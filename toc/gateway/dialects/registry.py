"""Every dialect, by the name of its option."""

from __future__ import annotations

from toc.gateway.dialects.delay_task import DelayTask
from toc.gateway.dialects.lmstfy import Lmstfy
from toc.gateway.dialects.lmstfy_admin import LmstfyAdmin
from toc.gateway.dialects.port import Dialect
from toc.gateway.dialects.redis_delayed import RedisDelayed
from toc.gateway.dialects.youzan import Youzan

DIALECTS: dict[str, type[Dialect]] = {
    one.name: one for one in (Youzan, RedisDelayed, DelayTask, Lmstfy, LmstfyAdmin)
}
