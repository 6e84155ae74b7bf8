/* toc's two-phase protocol for one task, checked exhaustively by Spin. README.md says what is modelled, which
 * configurations are checked and what each [rule: ...] means; the same tags stand in the code.
 *
 * One step of a process is one statement on the row, one Redis script, or one decision in memory; any other
 * process may act between two steps, so every step may come arbitrarily late. Time is a small counter.
 */

/* --- the configuration: how much of what may happen (-DNAME=n) ------------------------------------------- */

#ifndef CANCELS
#define CANCELS 0      /* calls of cancel, one after another; each may break off halfway */
#endif
#ifndef RESCHEDULES
#define RESCHEDULES 0
#endif
#ifndef REDRIVES
#define REDRIVES 0
#endif
#ifndef CRASHES
#define CRASHES 0      /* deaths of worker processes, known to their daemon */
#endif
#ifndef PAUSES
#define PAUSES 0       /* time-outs of what a living worker holds */
#endif
#ifndef FORGETS
#define FORGETS 0      /* losses: Redis forgets one of its sets, or all */
#endif
#ifndef SNAPSHOTS
#define SNAPSHOTS 0    /* Redis comes back as it was at some instant before */
#endif
#ifndef OUTAGES
#define OUTAGES 0      /* Redis out of reach for a while */
#endif
#ifndef LOST_REPLIES
#define LOST_REPLIES 0 /* a worker's move is applied and it does not learn of it */
#endif
#ifndef AMBIGUOUS
#define AMBIGUOUS 0    /* COMMITs of a submit whose answer is lost */
#endif
#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef LAST
#define LAST 2         /* the clock stops here */
#endif

#define TRIES 2        /* --retries */

/* Mutations: -DNO_... drops a guard, and the checker must find what goes wrong (tests/model). */
#ifdef NO_QUEUE_FENCE
#define ANY_ENTRY || prepare.there
#else
#define ANY_ENTRY
#endif
#ifdef NO_STATUS_FENCE
#define ANY_STATUS || (row.there && row.version == version)
#else
#define ANY_STATUS
#endif
#ifdef NO_ROW_CHECK
#define UNFIT false
#else
#define UNFIT (!is_pending || row.next_time > now)
#endif
#ifdef OLD_SECOND_CANCEL
#define SECOND_CANCEL (told && prepared && cancelled_near)
#else
#define SECOND_CANCEL (told -> (row.attempts > 0 || (prepared && cancelled_near)) : cancelled_near)
#endif
#ifdef NO_WHOLE_SCORE
#define KEPT_ALIVE false
#else
#define KEPT_ALIVE !prepare.listed
#endif
#ifdef NO_BUMP
#define UNWRITTEN && attempts <= TRIES - remaining
#else
#define UNWRITTEN
#endif
#ifdef NO_LAST_LOOK
#define IN_TIME true
#else
#define IN_TIME !late[w]
#endif
#ifdef NO_CRASH_FENCE
#define SAME_CRASHES(n)
#else
#define SAME_CRASHES(n) && row.crashes == n
#endif

/* --- the row: what MySQL holds ---------------------------------------------------------------------------- */

#define PENDING   0
#define DEAD      1    /* 4 in the table; two bits are enough here */
#define PROCESSED 2
#define CANCELLED 3

typedef Row {
  bit there;
  unsigned status : 2;
  unsigned version : 2;
  unsigned attempts : 2;
  unsigned crashes : 2;
  unsigned action_time : 2;
  unsigned next_time : 2
}
Row row;
#define is_pending (row.there && row.status == PENDING)

/* --- the index: what Redis holds -------------------------------------------------------------------------- */

/* A StoreQueue score is due + rest/32: rest 0 means that no try was used, else it is the tries left. */
typedef Scheduled { bit there; unsigned due : 2; unsigned rest : 2 }
/* A PrepareQueue score without its seconds is the fence: the tries left and the claim of who took it. */
typedef Prepared { bit there; unsigned remaining : 2; unsigned claim : 3; bit listed }
/* listed: its seconds are still those that reclaim has seen, nobody has kept it alive since. */

Scheduled store;
Prepared prepare;
bit dead_queue;
bit redis_up = 1;

#define tries_left(attempts) (attempts >= TRIES -> 1 : TRIES - attempts)
#define rest_of(attempts)    (attempts == 0 -> 0 : tries_left(attempts))
#define stands(r, c)         (prepare.there && prepare.remaining == r && prepare.claim == c)

/* The scripts of toc/queue/lua; each is one step of its caller. */

inline drop_store()   { store.there = 0; store.due = 0; store.rest = 0 }
inline drop_prepare() { prepare.there = 0; prepare.remaining = 0; prepare.claim = 0; prepare.listed = 0 }

inline zadd_lt(at, left) {
  if
  :: !store.there || at < store.due || (at == store.due && left < store.rest) ->
     store.there = 1; store.due = at; store.rest = left            /* [rule: never-later] */
  :: else
  fi
}

inline lua_add(at, left) {
  if
  :: prepare.there                                             /* [rule: prepared-stays] */
  :: else -> zadd_lt(at, left)
  fi
}

inline lua_commit(tries, whom) {
  if
  :: stands(tries, whom) ANY_ENTRY -> drop_prepare()                  /* [rule: queue-fence] */
  :: else
  fi
}

inline lua_rollback(tries, whom, at, left) {
  if
  :: stands(tries, whom) ANY_ENTRY -> zadd_lt(at, left); drop_prepare()   /* [rule: queue-fence] */
  :: else
  fi
}

inline lua_bury(tries, whom) {
  if
  :: stands(tries, whom) ANY_ENTRY -> dead_queue = 1; drop_prepare()  /* [rule: queue-fence] */
  :: else
  fi
}

inline lua_restore_dead() {
  if
  :: prepare.there                                             /* [rule: prepared-stays] */
  :: else -> dead_queue = 1; drop_store()
  fi
}

/* --- time, faults, and what the properties are told by ---------------------------------------------------- */

unsigned now : 2;
byte claim[2];               /* the number under which a worker takes; a new process draws a new one */
bit late[2];                 /* prepare_timeout has passed since the worker last kept alive what it holds */
unsigned next_claim : 3;
unsigned crashes_left : 2 = CRASHES;
unsigned pauses_left : 2 = PAUSES;
unsigned losses : 2;         /* how often Redis has lost writes */

unsigned credit : 4;         /* starts that are explained: one, and one for each failure, fault and new deadline */
unsigned unpaid : 3;         /* time-outs and deaths that have not been charged as a try */
unsigned newest : 2;         /* 1 + the worker whose attempt passed the row check last */
bit tried;                   /* a handler has started for the present version of the row */
bit tried_before;            /* ... for the version before it */
bit quiet;                   /* a cancel has answered CANCELLED: nothing may start any more */
bit over;                    /* a cancel was acknowledged before the due time: that deadline's handler may not start */
bit cancelled_near;          /* the row was cancelled near its due time or after it (gmt_modified tells) */
bit moved;                   /* the last reschedule has answered RESCHEDULED: nothing of the old version may start */

#ifdef NO_COUNTS
#define COUNT(what) skip
#else
#define COUNT(what) what
#endif
#define explain() COUNT(credit++)
inline fault() { COUNT(credit++); COUNT(unpaid++) }

#define of_living(c) (c == claim[0] || c == claim[1])

active proctype Time() {
end:
  do
  :: atomic { now < LAST -> now++ }
  od
}

/* --- submit ----------------------------------------------------------------------------------------------- */

proctype Submit() {
  unsigned lost : 2 = AMBIGUOUS;
  unsigned due : 2;
  if
  :: due = 1
#ifndef SOON
  :: due = LAST
#endif
  fi;
insert:
  atomic {
    if
    :: !row.there -> row.there = 1; row.action_time = due; row.next_time = due; credit = 1
    :: else                                /* a clash with an equal row: the first sending stored it. [rule: resend] */
    fi;
    if
    :: lost -> lost--; goto insert         /* committed, and the answer was lost */
    :: true
    fi
  }
  atomic {                                 /* acknowledged; only now the index. [rule: row-first] */
    if
    :: redis_up -> d_step { lua_add(due, 0) }
    :: true                                /* the application dies here */
    fi;
    due = 0
  }
}

/* --- a worker --------------------------------------------------------------------------------------------- */

#define IDLE    0
#define TAKEN   1      /* prepared, its row not read yet */
#define READY   2      /* checked; waits for a thread */
#define REFUSED 3      /* checked; must not run */
#define RUNNING 4
#define DONE    5      /* the handler has returned */
#define FAILED  6      /* the handler has raised */
#define REREAD  7      /* a guard met a row that somebody else has changed */
#define MARK    8      /* the row is cancelled */
#define LEAVING 9      /* its row is written, its move decided */

#define COMMIT   1
#define ROLLBACK 2
#define BURY     3

typedef Move { unsigned what : 2; bit again; unsigned remaining : 2; unsigned claim : 3; unsigned due : 2; unsigned rest : 2 }

inline let_go() {
  stage = IDLE; remaining = 0; mine = 0; version = 0; attempts = 0; crashes = 0;
  plan = 0; due = 0; rest = 0; late[w] = 0
}

#ifdef NO_MOVING
#define MOVING false
#else
#define MOVING (move.what != 0 && !move.again && move.remaining == prepare.remaining && move.claim == prepare.claim)
#endif

#ifdef NO_SECOND_CHECK
#define STARTED (stage != IDLE)
#else
#define STARTED (stage >= RUNNING)
#endif

inline hold() {
  remaining = prepare.remaining; mine = prepare.claim; late[w] = 0;
  if
  :: STARTED                                           /* it runs on under the new fence. [rule: held-once] */
  :: else -> plan = 0; due = 0; rest = 0; version = 0; attempts = 0; crashes = 0; stage = TAKEN
  fi
}

inline leave(kind, at, left) {
  plan = kind; due = at; rest = left; version = 0; attempts = 0; crashes = 0; stage = LEAVING
}

inline by_row() {
  if
  :: !row.there || row.status == PROCESSED || row.status == CANCELLED -> leave(COMMIT, 0, 0)
  :: row.there && row.status == DEAD -> leave(BURY, 0, 0)
  :: else -> leave(ROLLBACK, row.next_time, rest_of(row.attempts))
  fi
}

proctype Worker(bit w) {
  unsigned stage : 4;
  unsigned remaining : 2, mine : 3;                    /* the fence of what it holds */
  unsigned version : 2, attempts : 2, crashes : 2, due : 2;  /* the row as the row check read it */
  unsigned plan : 2, rest : 2;                         /* the move that is decided, with due */
  Move move;                                           /* the move that is under way */
  unsigned lost_replies : 2 = LOST_REPLIES;            /* its first moves, of which it does not learn */

end:
  do
  :: d_step { redis_up && store.there && store.due <= now ->                /* poll: prepare */
       if
       :: prepare.there -> skip                        /* it keeps its entry there. [rule: prepared-stays] */
       :: else ->
          prepare.there = 1; prepare.claim = claim[w];
          prepare.remaining = (store.rest == 0 -> TRIES : store.rest);
          if
          :: MOVING                                   /* left for adoption. [rule: move-before-hold] */
          :: else -> hold()
          fi
       fi;
       drop_store() }

  :: d_step { stage == IDLE && redis_up && prepare.there && prepare.claim == claim[w] && !MOVING ->  /* adopt */
       prepare.listed = 0; hold() }

  :: d_step { stage == TAKEN ->                                             /* the row check. [rule: row-check] */
       if
       :: UNFIT -> by_row(); stage = REFUSED
       :: else ->
          version = row.version; attempts = row.attempts; crashes = row.crashes;
          due = row.next_time; stage = READY
       fi }

  :: d_step { stage != IDLE && redis_up && (late[w] == stands(remaining, mine) || prepare.listed) ->  /* keep-alive */
       late[w] = !stands(remaining, mine);
       if
       :: late[w]
       :: else -> prepare.listed = 0
       fi }

  :: d_step { stage == READY && late[w] -> let_go() }                       /* [rule: last-look] */

  :: d_step { stage == READY && IN_TIME ->                                  /* the handler starts */
       assert(due <= now);                             /* E: never early */
       assert(!quiet || losses);                       /* C: cancel holds */
       assert(!(over && version == row.version));
       COUNT(assert(credit > 0));                            /* D: every run is explained */
       COUNT(credit--);
       assert(!(moved && version + 1 == row.version) || losses);
       tried = tried || (version == row.version);
       tried_before = tried_before || (version + 1 == row.version);
       COUNT(newest = w + 1); stage = RUNNING }

  :: stage == RUNNING -> stage = DONE
  :: stage == RUNNING -> stage = FAILED

  :: d_step { stage == DONE ->                                              /* the row first. [rule: row-first] */
       if
       :: is_pending && row.version == version ANY_STATUS -> /* [rule: success-fence] */
          row.status = PROCESSED; row.next_time = 0; leave(COMMIT, 0, 0)
       :: else -> stage = REREAD
       fi }

  :: atomic { stage == FAILED ->
       if
       :: is_pending && row.version == version && row.attempts == attempts SAME_CRASHES(crashes) ->
          COUNT(assert(newest == w + 1 || losses));           /* a stale failure never wins */
          row.attempts = row.attempts + 1; row.crashes = 0;
          if
          :: row.attempts >= TRIES -> goto die
          :: goto die                                  /* raise Dead */
          :: row.attempts < TRIES -> row.next_time = now
          :: row.attempts < TRIES && now < LAST -> row.next_time = now + 1
          fi;
          explain();
          leave(ROLLBACK, row.next_time, rest_of(row.attempts));
          goto next;
die:      row.status = DEAD; row.next_time = 0; leave(BURY, 0, 0)
       :: else -> stage = REREAD
       fi;
next:  skip }

  :: d_step { stage == REREAD ->
       if
       :: row.there && row.status == CANCELLED -> stage = MARK
       :: else -> by_row()
       fi }

  :: d_step { stage == MARK ->                         /* before the entry goes. [rule: mark-tried] */
       if
       :: row.attempts == 0 -> row.attempts = 1
       :: else
       fi;
       leave(COMMIT, 0, 0) }

  :: d_step { (stage == LEAVING || stage == REFUSED) && move.what == 0 ->                      /* not held any more, but on its way. [rule: one-way] */
       move.what = plan; move.remaining = remaining; move.claim = mine; move.due = due; move.rest = rest; let_go() }

  :: d_step { move.what != 0 && !move.again && redis_up ->
       if
       :: move.what == COMMIT -> lua_commit(move.remaining, move.claim)
       :: move.what == ROLLBACK -> lua_rollback(move.remaining, move.claim, move.due, move.rest)
       :: move.what == BURY -> lua_bury(move.remaining, move.claim)
       fi;
       if
       :: lost_replies > 0 -> lost_replies--; move.again = 1
       :: else -> move.what = 0; move.remaining = 0; move.claim = 0; move.due = 0; move.rest = 0
       fi }

  :: d_step { move.what != 0 && !move.again && !redis_up -> move.again = 1 }  /* the node did not answer */

  :: d_step { move.again ->                            /* tried again, unless it was taken anew. [rule: one-way] */
       move.again = 0;
       if
       :: stage != IDLE -> move.what = 0; move.remaining = 0; move.claim = 0; move.due = 0; move.rest = 0
       :: else
       fi }

  :: atomic { crashes_left > 0 && (stage != IDLE || move.what) ->           /* killed; its daemon knows */
       crashes_left--; fault();
       let_go();
       move.what = 0; move.again = 0; move.remaining = 0; move.claim = 0; move.due = 0; move.rest = 0;
       claim[w] = next_claim; next_claim++ }
  od
}

/* --- reclaim ---------------------------------------------------------------------------------------------- */

proctype Reclaim() {
  unsigned remaining : 2, whose : 3;                   /* the fence as listed */
  unsigned status : 2, version : 2, attempts : 2, crashes : 2, next_time : 2;
  bit there, charged;

end:
  do
  :: atomic {
       if
       :: redis_up && prepare.there && !of_living(prepare.claim)            /* [rule: known-death] */
       :: redis_up && prepare.there && of_living(prepare.claim) && pauses_left > 0 ->  /* prepare_timeout is over */
          pauses_left--; fault();
          if
          :: prepare.claim == claim[0] -> late[0] = 1
          :: else -> late[1] = 1
          fi
       fi;
       remaining = prepare.remaining; whose = prepare.claim; prepare.listed = 1 };
     d_step { there = row.there; status = row.status; version = row.version; attempts = row.attempts;
       crashes = row.crashes; next_time = row.next_time };
     d_step {
       if
       :: there && status == CANCELLED ->
          if
          :: row.attempts == 0 -> row.attempts = 1     /* [rule: mark-tried] */
          :: else
          fi
       :: there && status == PENDING UNWRITTEN && next_time <= now ->
          if
          :: is_pending && row.version == version && row.attempts == attempts && row.crashes == crashes ->
             row.next_time = (now > row.action_time -> now : row.action_time);
             row.crashes = row.crashes + 1;
             if
             :: attempts <= TRIES - remaining && row.attempts < TRIES - 1 -> row.attempts = row.attempts + 1; /* [rule: never-the-last] */
                COUNT(assert(unpaid > 0)); COUNT(unpaid--)
             :: else
             fi;
             attempts = row.attempts; next_time = row.next_time
          :: else -> there = 0; whose = 7              /* lost: the next look reads the row again */
          fi
       :: else
       fi };
     d_step { redis_up ->                              /* the row is written: now the entry. [rule: row-before-move] */
       if
       :: whose == 7 || KEPT_ALIVE                /* kept alive since. [rule: whole-score] */
       :: whose != 7 && !(KEPT_ALIVE) && (!there || status == PROCESSED || status == CANCELLED) -> lua_commit(remaining, whose)
       :: whose != 7 && !(KEPT_ALIVE) && there && status == DEAD -> lua_bury(remaining, whose)
       :: whose != 7 && !(KEPT_ALIVE) && there && status == PENDING ->
          lua_rollback(remaining, whose, next_time, rest_of(attempts))
       fi;
       remaining = 0; whose = 0; status = 0; version = 0; attempts = 0; crashes = 0; next_time = 0; there = 0 }
  od
}

/* --- the sweep -------------------------------------------------------------------------------------------- */

proctype Sweep() {
  unsigned due : 2, rest : 2;
end:
  do
  :: d_step { is_pending -> due = row.next_time; rest = rest_of(row.attempts) };
     d_step { if :: redis_up -> lua_add(due, rest) :: else fi; due = 0; rest = 0 }
  :: row.there && row.status == DEAD;
     d_step { if :: redis_up -> lua_restore_dead() :: else fi }
  od
}

/* --- applications and operators --------------------------------------------------------------------------- */

proctype Cancel() {
  unsigned calls : 2 = CANCELS;
  unsigned status : 2, version : 2;
  bit changed, attempted, told, due, prepared, started;

  do
  :: calls == 0 -> break
  :: d_step { calls > 0 && row.there ->                /* the row first. [rule: row-first] */
       calls--;
       status = row.status; version = row.version; attempted = (row.attempts > 0 || row.crashes > 0);
       changed = (status == PENDING);
       if
       :: changed ->
          row.status = CANCELLED; row.next_time = 0;
          cancelled_near = (now >= row.action_time)
       :: else
       fi };
     atomic {
       if
       :: status == PROCESSED || status == DEAD -> goto answered         /* TOO_LATE */
       :: calls > 0 && (status == PENDING || status == CANCELLED) -> goto answered   /* its process dies halfway */
       :: (status == PENDING || status == CANCELLED) && redis_up ->
          told = 1; prepared = prepare.there; due = (now >= row.action_time); drop_store()
       :: (status == PENDING || status == CANCELLED) && !redis_up ->
          due = (now >= row.action_time)
       fi };
     d_step {                                          /* [rule: honest-cancel] */
       if
       :: attempted -> started = 1
       :: !attempted && !changed -> started = SECOND_CANCEL
       :: !attempted && changed && !told -> started = (due || version > 0)
       :: !attempted && changed && told && prepared && version > 0 -> started = 1
       :: !attempted && changed && told && !(prepared && version > 0) && !due
       :: !attempted && changed && told && !(prepared && version > 0) && due && prepared -> started = 1
       :: else -> started = (row.attempts > 0)         /* who finishes it has marked the row */
       fi };
     d_step {
       if
       :: started ->                                   /* MAY_HAVE_STARTED, also when asked again */
          assert(!(changed && version == 0 && now < row.action_time));
          if
          :: row.attempts == 0 -> row.attempts = 1
          :: else
          fi
       :: else ->                                      /* CANCELLED */
          assert(!tried || losses);                    /* it never ran */
          quiet = 1
       fi;
       over = over || now < row.action_time };         /* C: acknowledged before it was due */
answered:
     atomic { status = 0; version = 0; changed = 0; attempted = 0; told = 0; due = 0; prepared = 0; started = 0 }
  od
}

proctype Reschedule() {
  unsigned calls : 2 = RESCHEDULES;
  unsigned version : 2, attempts : 2, crashes : 2, before : 2, after : 2;
  bit started;

  do
  :: calls == 0 -> break
  :: calls > 0 && row.there ->
     calls--;
read:
     atomic {
       if
       :: !is_pending -> goto answered                 /* TOO_LATE */
       :: now < LAST -> after = LAST
       :: now + 1 < LAST -> after = now + 1
       :: now == LAST -> goto answered
       fi;
       version = row.version; attempts = row.attempts; crashes = row.crashes };
     atomic {
       if
       :: is_pending && row.version == version && row.attempts == attempts && row.crashes == crashes ->
          before = row.action_time; started = (attempts > 0 || crashes > 0);
          row.version = row.version + 1; row.attempts = 0; row.crashes = 0;  /* [rule: new-version] */
          row.action_time = after; row.next_time = after;
          explain(); tried_before = tried; tried = 0; moved = 0
       :: else -> goto read
       fi };
     atomic {
       if
       :: true -> goto answered                        /* its process dies halfway */
       :: redis_up ->
          if
          :: prepare.there                             /* [rule: prepared-stays] */
          :: else -> store.there = 1; store.due = after; store.rest = 0
          fi
       :: !redis_up
       fi;
       started = started || now >= before };
     d_step {
       if
       :: started                                      /* MAY_HAVE_STARTED */
       :: else ->                                      /* RESCHEDULED */
          assert(!tried_before || losses);
          moved = 1
       fi };
answered:
     atomic { version = 0; attempts = 0; crashes = 0; before = 0; after = 0; started = 0 }
  od
}

proctype Redrive() {
  unsigned calls : 2 = REDRIVES;
end:
  do
  :: calls == 0 -> break
  :: d_step { calls > 0 && row.there && row.status == DEAD ->
       calls--;
       row.status = PENDING; row.version = row.version + 1; row.attempts = 0; row.crashes = 0;  /* [rule: new-version] */
       row.next_time = now;
       explain(); tried_before = tried; tried = 0; moved = 0 };
     atomic {
       if
       :: redis_up ->
          if
          :: prepare.there                             /* [rule: prepared-stays] */
          :: else -> zadd_lt(now, 0)
          fi;
          dead_queue = 0
       :: true                                         /* it dies here, or Redis is away */
       fi }
  od
}

/* --- what happens to Redis -------------------------------------------------------------------------------- */

proctype Redis() {
  unsigned forgets : 2 = FORGETS, snapshots : 2 = SNAPSHOTS, outages : 2 = OUTAGES;
  Scheduled old_store;
  Prepared old_prepare;
  bit old_dead, saved;

end:
  do
  :: atomic { forgets > 0 && row.there -> forgets--; losses++; explain();
       if
       :: drop_store()
       :: drop_prepare()
       :: dead_queue = 0
       :: drop_store(); drop_prepare(); dead_queue = 0
       fi }
  :: d_step { snapshots > 0 && !saved && (store.there || prepare.there || dead_queue) -> saved = 1;
       old_store.there = store.there; old_store.due = store.due; old_store.rest = store.rest;
       old_prepare.there = prepare.there; old_prepare.remaining = prepare.remaining;
       old_prepare.claim = prepare.claim; old_dead = dead_queue }
  :: d_step { saved -> saved = 0; snapshots--; losses++; explain();
       store.there = old_store.there; store.due = old_store.due; store.rest = old_store.rest;
       prepare.there = old_prepare.there; prepare.remaining = old_prepare.remaining;
       prepare.claim = old_prepare.claim; prepare.listed = 0; dead_queue = old_dead;
       old_store.there = 0; old_store.due = 0; old_store.rest = 0;
       old_prepare.there = 0; old_prepare.remaining = 0; old_prepare.claim = 0; old_dead = 0 }
  :: d_step { redis_up && outages > 0 -> redis_up = 0; outages-- }
  :: d_step { !redis_up -> redis_up = 1 }
  od
}

init {
  atomic {
    claim[0] = 0; claim[1] = 1; next_claim = 2;
    run Submit(); run Worker(0); run Worker(1); run Reclaim();
#ifndef NO_SWEEP
    run Sweep();
#endif
#if CANCELS
    run Cancel();
#endif
#if RESCHEDULES
    run Reschedule();
#endif
#if REDRIVES
    run Redrive();
#endif
#if FORGETS || SNAPSHOTS || OUTAGES
    run Redis();
#endif
    skip
  }
}

/* T: it settles. Whatever has happened, in the end the task has ended and the index says nothing else. */
#define ended (row.there && row.status != PENDING && !store.there && !prepare.there)
ltl settles { <> [] (ended && (row.status == DEAD -> dead_queue)) }
