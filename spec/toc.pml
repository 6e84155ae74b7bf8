/* toc's two-phase protocol for one task, checked exhaustively by Spin. README.md says what is modelled and what
 * is not, which searches are made, and what each [rule: ...] means; the same tags stand in the code.
 *
 * One step of a process is one statement on the row, one Redis script, or one decision in memory. Any other
 * process may act between two steps, so each may come arbitrarily late. Time is a small counter.
 */

/* --- the search: how much of what may happen (-DNAME=n) ----------------------------------------------------- */

#ifndef CANCELS
#define CANCELS 0       /* calls of cancel, one after another; all but the last may break off halfway */
#endif
#ifndef RESCHEDULES
#define RESCHEDULES 0   /* ... of reschedule */
#endif
#ifndef REDRIVES
#define REDRIVES 0      /* ... of redrive */
#endif
#ifndef CRASHES
#define CRASHES 0       /* deaths of worker processes, known to their daemon; deaths of who reclaims count, too */
#endif
#ifndef PAUSES
#define PAUSES 0        /* time-outs of what a living worker holds */
#endif
#ifndef HANDOVERS
#define HANDOVERS 0     /* worker 0 gives back what it holds, in good order */
#endif
#ifndef UNREAD
#define UNREAD 0        /* rows that worker 0 cannot read: it puts the entry away for a while */
#endif
#ifndef DISTURBS
#define DISTURBS 0      /* tries of worker 0 that another task's handler breaks off */
#endif
#ifndef POSTPONES
#define POSTPONES 0     /* tries of worker 0 that cannot take place now: the target of a webhook is away */
#endif
#ifndef RECLAIMERS
#define RECLAIMERS 1    /* 2: both workers take themselves for the owner of the slot */
#endif
#ifndef FORGETS
#define FORGETS 0       /* Redis forgets one of its sets, or all */
#endif
#ifndef SNAPSHOTS
#define SNAPSHOTS 0     /* Redis comes back as it was at some instant before */
#endif
#ifndef OUTAGES
#define OUTAGES 0       /* Redis out of reach for a while */
#endif
#ifndef LOST_REPLIES
#define LOST_REPLIES 0  /* moves that are applied and of which their worker does not learn */
#endif
#ifndef AMBIGUOUS
#define AMBIGUOUS 0     /* COMMITs of the submit, and of each worker, whose answers are lost */
#endif

/* To make a search smaller, leave out:
 *   SOON         tasks due at the last instant, and the index entry that submit adds itself (the sweep adds it)
 *   ALL_SUCCEED  handlers that raise
 *   NO_COUNTS    what the assertions on duplicates, charges and stale failures count with
 */

#define TRIES 2         /* --retries */
#if PAUSES * RECLAIMERS + DISTURBS > 3
#define CRASH_BITS 3    /* of the counter on the row, which must not come round */
#else
#define CRASH_BITS 2
#endif
#define LAST 2          /* the clock stops here */
#define LATER LAST      /* put away until then; never too early, and the clock gets there */

/* Mutations: each drops one guard, and the search must find what goes wrong then. */
#ifdef NO_ROW_CHECK
#define MAY_RUN true
#else
#define MAY_RUN (is_pending && row.next_time <= now)
#endif
#ifdef NO_LAST_LOOK
#define IN_TIME true
#else
#define IN_TIME !late[w]
#endif
#ifdef NO_SECOND_CHECK
#define GOES_ON (stage != IDLE)
#else
#define GOES_ON (stage >= RUNNING)
#endif
#ifdef NO_ONE_WAY
#define MOVING false
#else
#define MOVING (move.what && !move.again && move.remaining == prepare.remaining && move.claim == prepare.claim)
#endif
#ifdef NO_FAILURE_FENCE
#define MAY_FAIL row.there
#else
#define MAY_FAIL (is_pending && same_try)
#endif
#ifdef NO_SUCCESS_FENCE
#define UNFINISHED row.there
#else
#define UNFINISHED is_pending
#endif
#ifdef NO_CRASH_FENCE
#define SAME_CRASHES true
#else
#define SAME_CRASHES (row.crashes == crashes)
#endif
#ifdef NO_QUEUE_FENCE
#define STANDS(tries, whom) prepare.there
#else
#define STANDS(tries, whom) stands(tries, whom)
#endif
#ifdef NO_WHOLE_SCORE
#define UNTOUCHED true
#else
#define UNTOUCHED (prepare.listed & me)
#endif
#ifdef NO_COUNTED_CRASH
#define MAY_RUN_ON false
#else
#define MAY_RUN_ON of_living(whose)
#endif
#define CHARGED (tries_left(attempts) != remaining)
#define CRASHED (next_time <= now && (MAY_RUN_ON || !CHARGED))
#ifdef NO_NEVER_THE_LAST
#define IS_LAST false
#else
#define IS_LAST (attempts == TRIES - 1)
#endif
#ifdef NO_MARK
#define mark_tried() skip
#else
#define mark_tried() if :: row.attempts == 0 -> row.attempts = 1 :: else fi
#endif
#ifdef NO_MOVED_MARK
#define mark_moved() skip
#else
#define mark_moved() mark_begun()
#endif
#ifdef NO_RECLAIMED_MARK
#define mark_reclaimed() skip
#else
#define mark_reclaimed() mark_begun()
#endif
#ifdef NO_STOPPED_MARK
#define mark_stopped() skip
#else
#define mark_stopped() mark_begun()
#endif
#ifdef NO_KEPT_MARK
#define WAS_TRIED false
#else
#define WAS_TRIED (row.attempts || row.crashes)
#endif

/* --- the row: what MySQL holds ------------------------------------------------------------------------------ */

#define PENDING   0
#define DEAD      1     /* 4 in the table; two bits are enough here */
#define PROCESSED 2
#define CANCELLED 3

typedef Row {
  bit there;
  unsigned status : 2;
  unsigned version : 2;
  unsigned attempts : 2;
  unsigned crashes : CRASH_BITS;
  bit begun;            /* a try has begun that neither of them counts any more, or yet: last_error */
  unsigned action_time : 2;
  unsigned next_time : 2
}
Row row;

#define is_pending (row.there && row.status == PENDING)
#define mark_begun() if :: row.status == PENDING || row.status == CANCELLED -> row.begun = 1 :: else fi
#define same_try   (row.version == version && row.attempts == attempts && SAME_CRASHES)

/* --- the index: what Redis holds ---------------------------------------------------------------------------- */

/* A StoreQueue score is due + rest/32: rest 0 means that no try was used, else it is the tries left. */
typedef Scheduled {
  bit there;
  unsigned due : 2;
  unsigned rest : 2
}

/* A PrepareQueue score without its seconds is the fence: the tries left, and the claim of who took the entry.
 * Listed: who of those that reclaim has seen these seconds; nobody has kept the entry alive since. */
typedef Prepared {
  bit there;
  unsigned remaining : 2;
  unsigned claim : 3;
  unsigned listed : 2
}

Scheduled store;
Prepared prepare;
bit dead_queue;
bit redis_up = 1;

#define tries_left(used) (used >= TRIES -> 1 : TRIES - used)
#define rest_of(used)    (used == 0 -> 0 : tries_left(used))
#define stands(tries, whom) (prepare.there && prepare.remaining == tries && prepare.claim == whom)

inline drop_store() { store.there = 0; store.due = 0; store.rest = 0 }
inline drop_prepare() { prepare.there = 0; prepare.remaining = 0; prepare.claim = 0; prepare.listed = 0 }

/* The scripts of toc/index/lua. Each is a part of one step of its caller. */

inline zadd(at, left) { store.there = 1; store.due = at; store.rest = left }

inline zadd_lt(at, left) {
  if
  :: !store.there || at < store.due || (at == store.due && left < store.rest) -> zadd(at, left)
  :: else                                                    /* [rule: never-later] */
  fi
}

inline lua_add(at, left) {
  if
  :: prepare.there                                           /* [rule: prepared-stays] */
  :: else -> zadd_lt(at, left)
  fi
}

inline lua_reschedule(at) {
  if
  :: prepare.there                                           /* [rule: prepared-stays] */
  :: else -> zadd(at, 0)
  fi
}

inline lua_commit(tries, whom) {
  if
  :: STANDS(tries, whom) -> drop_prepare()                   /* [rule: queue-fence] */
  :: else
  fi
}

inline lua_rollback(tries, whom, at, left) {
  if
  :: STANDS(tries, whom) -> zadd_lt(at, left); drop_prepare()
  :: else
  fi
}

inline lua_bury(tries, whom) {
  if
  :: STANDS(tries, whom) -> dead_queue = 1; drop_prepare()
  :: else
  fi
}

inline lua_restore_dead() {
  if
  :: prepare.there                                           /* [rule: prepared-stays] */
  :: else -> dead_queue = 1; drop_store()
  fi
}

inline lua_redrive(at) { lua_add(at, 0); dead_queue = 0 }

/* --- time and faults ---------------------------------------------------------------------------------------- */

unsigned now : 2;
byte claim[2];                  /* the number under which a worker takes; a new process draws another */
unsigned next_claim : 3;
bit late[2];                    /* prepare_timeout has passed since the worker last kept alive what it holds */
unsigned crashes_left : 2 = CRASHES;
unsigned pauses_left : 2 = PAUSES;
bit cancelled_near;             /* the row was cancelled at its due time or later (gmt_modified tells) */

#define of_living(c) (c == claim[0] || c == claim[1])
#if PAUSES == 1 && !CRASHES && !HANDOVERS
#define may_time_out(c) (c == claim[0])  /* the workers are alike: let it be the first */
#else
#define may_time_out(c) of_living(c)
#endif

active proctype Time() {
end:
  do
  :: now < LAST -> now++
  :: now == LAST                /* so that there is always a step, as liveness wants it */
  od
}

/* --- what the properties are told by ------------------------------------------------------------------------ */

unsigned losses : 2;            /* how often Redis has lost writes */
unsigned credit : 4;            /* starts that are explained: one, and one for each failure, fault, new deadline */
unsigned unpaid : 3;            /* time-outs and deaths that have not been charged as a try */
unsigned newest : 2;            /* 1 + the worker whose handler started last */
unsigned was : 2;               /* the row's status after the last step that changed it */
bit tried;                      /* a handler has started for the present version of the row */
bit tried_before;               /* ... for the version before it */
bit ever;                       /* ... for any version */
bit quiet;                      /* a cancel has answered CANCELLED: nothing may start any more */
bit over;                       /* a cancel was acknowledged before the due time: nothing may start for that one */
bit moved;                      /* the last reschedule has answered RESCHEDULED: nothing may start for the old time */

#ifdef NO_COUNTS
#define COUNT(what) skip
#else
#define COUNT(what) what
#endif
inline explain() { COUNT(credit++) }
inline fault() { COUNT(credit++); COUNT(unpaid++) }

/* X: what has ended stays as it ended; redrive alone begins anew. */
inline terminal_is_final() { assert(was == PENDING || row.status == was); was = row.status }

inline new_version(at) {        /* [rule: new-version] */
  row.begun = row.begun || WAS_TRIED;
  row.version = row.version + 1; row.attempts = 0; row.crashes = 0; row.next_time = at;
  terminal_is_final(); explain(); tried_before = tried; tried = 0; moved = 0
}

/* A stale failure wins when it changes a row that a newer try has. */
inline is_newest() { COUNT(assert(newest == w + 1 || losses)) }

inline starts() {
  assert(due <= now);                                        /* E: never early */
  assert(!quiet || losses);                                  /* C: cancel holds */
  assert(!(over && version == row.version));
  assert(!(moved && version + 1 == row.version) || losses);
  COUNT(assert(credit > 0)); COUNT(credit--);                /* D: every run is explained */
  COUNT(newest = w + 1);
  tried = tried || version == row.version;
  tried_before = tried_before || version + 1 == row.version;
  ever = 1
}

/* --- submit ------------------------------------------------------------------------------------------------- */

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
    :: else                     /* a clash with an equal row: the first sending has stored it. [rule: resend] */
    fi;
    if
    :: lost -> lost--; goto insert  /* committed, and the answer was lost */
    :: true
    fi
  }
  atomic {                      /* only now the index. [rule: row-first] */
    if
#ifndef SOON
    :: redis_up -> lua_add(due, 0)
#endif
    :: true                     /* the application dies here */
    fi;
    due = 0
  }
}

/* --- a worker ----------------------------------------------------------------------------------------------- */

#define IDLE    0
#define TAKEN   1               /* prepared; its row is not read yet */
#define READY   2               /* checked; waits for a thread */
#define REFUSED 3               /* checked; must not run */
#define RUNNING 4
#define DONE    5               /* the handler has returned */
#define FAILED  6               /* the handler has raised */
#define REREAD  7               /* a guard met a row that somebody else has changed */
#define MARK    8               /* the row is cancelled, or has a new deadline */
#define LEAVING 9               /* its row is written, its move decided */
#define STOPPED 10              /* its worker does not wait for its end */
#define BROKEN  11              /* another task's handler has broken it off */
#define PUT_OFF 12              /* it cannot take place now: its handler has run nothing */

#define COMMIT   1
#define ROLLBACK 2
#define BURY     3

typedef Move {
  unsigned what : 2;
  bit again;                    /* its node did not answer */
  unsigned remaining : 2;
  unsigned claim : 3;
  unsigned due : 2;
  unsigned rest : 2
}

inline forget_row() { version = 0; attempts = 0; crashes = 0; due = 0 }
inline let_go() { stage = IDLE; remaining = 0; mine = 0; late[w] = 0; plan = 0; rest = 0; forget_row() }
inline no_move() { move.what = 0; move.again = 0; move.remaining = 0; move.claim = 0; move.due = 0; move.rest = 0 }

inline hold() {
  remaining = prepare.remaining; mine = prepare.claim; late[w] = 0;
  if
  :: GOES_ON                    /* a try runs here: it goes on under the new fence. [rule: held-once] */
  :: else -> plan = 0; rest = 0; forget_row(); stage = TAKEN
  fi
}

inline leave(kind, at, left) { forget_row(); plan = kind; due = at; rest = left; stage = LEAVING }

inline by_row() {               /* [rule: row-decides] */
  if
  :: !row.there || row.status == PROCESSED || row.status == CANCELLED -> leave(COMMIT, 0, 0)
  :: row.there && row.status == DEAD -> leave(BURY, 0, 0)
  :: is_pending -> leave(ROLLBACK, row.next_time, rest_of(row.attempts))
  fi
}

proctype Worker(bit w) {
  unsigned stage : 4;
  unsigned remaining : 2, mine : 3;                          /* the fence of what it holds */
  unsigned version : 2, attempts : 2, crashes : CRASH_BITS, due : 2;  /* the row as the row check has read it */
  unsigned plan : 2, rest : 2;                               /* the move that is decided, with due */
  Move move;                                                 /* the move that is under way */
  unsigned lost_replies : 2 = LOST_REPLIES, ambiguous : 2 = AMBIGUOUS;
  unsigned handovers : 2 = (w == 0 -> HANDOVERS : 0);
  unsigned unread : 2 = (w == 0 -> UNREAD : 0);
#if DISTURBS
  unsigned disturbs : 2 = (w == 0 -> DISTURBS : 0);
#endif
#if POSTPONES
  unsigned postpones : 2 = (w == 0 -> POSTPONES : 0);
#endif

end:
  do
  :: d_step { redis_up && store.there && store.due <= now ->                /* poll: prepare */
       if
       :: prepare.there                                      /* it keeps its entry. [rule: prepared-stays] */
       :: else ->
          prepare.there = 1; prepare.claim = claim[w];
          prepare.remaining = (store.rest == 0 -> TRIES : store.rest);
          if
          :: MOVING                                          /* left for adoption. [rule: one-way] */
          :: else -> hold()
          fi
       fi;
       drop_store() }

     /* poll: adopt what stands under its claim and is not held, if it can be kept alive. [rule: adopted-alive] */
  :: d_step { stage == IDLE && redis_up && prepare.there && prepare.claim == claim[w] && !MOVING ->
       prepare.listed = 0; hold() }

  :: d_step { stage == TAKEN ->                              /* [rule: row-check] */
       if
       :: MAY_RUN ->
          version = row.version; attempts = row.attempts; crashes = row.crashes; due = row.next_time;
          stage = READY
       :: else -> by_row(); stage = REFUSED
       fi }

     /* keep alive, where that changes anything */
  :: d_step { stage != IDLE && redis_up && (late[w] == stands(remaining, mine) || prepare.listed) ->
       late[w] = !stands(remaining, mine);
       if
       :: late[w]
       :: else -> prepare.listed = 0
       fi }

  :: d_step { stage == READY && late[w] -> let_go() }        /* [rule: last-look] */
  :: d_step { stage == READY && IN_TIME -> starts(); stage = RUNNING }
  :: stage == RUNNING -> stage = DONE
#ifndef ALL_SUCCEED
  :: stage == RUNNING -> stage = FAILED
#endif

  :: atomic { stage == DONE ->                               /* the row first. [rule: row-first] */
       if
       :: UNFINISHED && row.version == version ->            /* [rule: success-fence] */
          row.status = PROCESSED; row.next_time = 0; terminal_is_final();
          if
          :: ambiguous -> ambiguous--                        /* the answer is lost: it is written again */
          :: leave(COMMIT, 0, 0)
          fi
       :: else -> stage = REREAD
       fi }

  :: atomic { stage == FAILED ->
       if
       :: MAY_FAIL ->                                        /* [rule: failure-fence] */
          is_newest();
          row.attempts = row.attempts + 1; row.crashes = 0;
          if
          :: row.attempts < TRIES -> row.next_time = now; explain()
          :: row.attempts < TRIES && now < LAST -> row.next_time = now + 1; explain()
          :: row.status = DEAD; row.next_time = 0            /* out of tries, or Dead was raised */
          fi;
          terminal_is_final();
          if
          :: ambiguous -> ambiguous--
          :: row.status == DEAD -> leave(BURY, 0, 0)         /* [rule: dead-first] */
          :: row.status != DEAD -> leave(ROLLBACK, row.next_time, rest_of(row.attempts))
          fi
       :: else -> stage = REREAD
       fi }

#if DISTURBS
  :: d_step { disturbs && stage == RUNNING -> disturbs--; stage = BROKEN }

     /* no try is used up, but it counts as a crash: a task that this happens to again and again runs alone */
  :: atomic { stage == BROKEN ->
       if
       :: MAY_FAIL ->                                        /* [rule: failure-fence] */
          is_newest();
          row.crashes = row.crashes + 1;
          row.next_time = (now > row.action_time -> now : row.action_time);
          explain();
          if
          :: ambiguous -> ambiguous--
          :: leave(ROLLBACK, row.next_time, rest_of(row.attempts))
          fi
       :: else -> stage = REREAD
       fi }
#endif

#if POSTPONES
  :: d_step { postpones && stage == READY && IN_TIME -> postpones--; stage = PUT_OFF }

     /* the row alone says when it is due again; no try is used up, and the row stays the same try's */
  :: atomic { stage == PUT_OFF ->                            /* [rule: postponed] */
       if
       :: MAY_FAIL ->                                        /* [rule: failure-fence] */
          row.next_time = LATER;
          if
          :: ambiguous -> ambiguous--
          :: leave(ROLLBACK, row.next_time, rest_of(row.attempts))
          fi
       :: else -> stage = REREAD
       fi }
#endif

  :: d_step { stage == REREAD ->
       if
       :: is_pending || (row.there && row.status == CANCELLED) -> by_row(); stage = MARK
       :: else -> by_row()
       fi }

     /* before the entry goes: a cancel that is under way looks for it, then for the mark. [rule: mark-tried] */
  :: d_step { stage == MARK ->
       if
       :: plan == COMMIT -> mark_tried()
       :: plan == ROLLBACK -> mark_moved()
       fi;
       stage = LEAVING }
#if HANDOVERS
  :: d_step { stage == STOPPED -> mark_stopped(); version = 0; attempts = 0; crashes = 0; stage = LEAVING }
#endif

     /* not held any more, but on its way. [rule: one-way] */
  :: d_step { (stage == LEAVING || stage == REFUSED) && move.what == 0 ->
       move.what = plan; move.remaining = remaining; move.claim = mine; move.due = due; move.rest = rest;
       let_go() }

  :: atomic { move.what && !move.again && redis_up ->
       if
       :: move.what == COMMIT -> lua_commit(move.remaining, move.claim)
       :: move.what == ROLLBACK -> lua_rollback(move.remaining, move.claim, move.due, move.rest)
       :: move.what == BURY -> lua_bury(move.remaining, move.claim)
       fi;
       if
       :: lost_replies -> lost_replies--; move.again = 1
       :: no_move()
       fi }

  :: d_step { move.what && !move.again && !redis_up -> move.again = 1 }

     /* a move is tried again, unless the id was taken anew meanwhile */
  :: d_step { move.again ->
       if
       :: stage == IDLE -> move.again = 0
       :: else -> no_move()
       fi }

#if UNREAD
     /* its table does not answer: due later than its row says, nothing is charged  [rule: put-away] */
  :: d_step { unread && stage == TAKEN ->
       unread--; leave(ROLLBACK, LATER, (remaining == TRIES -> 0 : remaining)); stage = REFUSED }
#endif

#if HANDOVERS
  :: d_step { handovers && stage == TAKEN ->                 /* its row could not be read */
       handovers--; leave(ROLLBACK, now, (remaining == TRIES -> 0 : remaining)); stage = REFUSED }
  :: d_step { handovers && stage == READY ->
       handovers--; plan = ROLLBACK; rest = rest_of(attempts); stage = REFUSED }
  :: d_step { handovers && stage == RUNNING ->               /* it runs again */
       handovers--; plan = ROLLBACK; rest = rest_of(attempts); explain(); stage = STOPPED }
#endif

#if CRASHES
  :: d_step { crashes_left && (stage != IDLE || move.what) ->               /* killed; its daemon knows */
       crashes_left--; fault(); let_go(); no_move();
       claim[w] = next_claim; next_claim++ }
#endif
  od
}

/* --- reclaim ------------------------------------------------------------------------------------------------ */

inline write_crash() {
  d_step {
    if
    :: lost
    :: !lost && there && status == CANCELLED -> mark_tried()            /* [rule: mark-tried] */
    :: !lost && there && status == PENDING && !CRASHED && version > 0 -> mark_reclaimed()
    :: !lost && there && status == PENDING && CRASHED ->                /* [rule: crash-counted] */
       if
       :: is_pending && same_try ->                                     /* [rule: failure-fence] */
          row.crashes = row.crashes + 1;
          row.next_time = (now > row.action_time -> now : row.action_time);
          if
          :: !CHARGED && !IS_LAST ->                                    /* [rule: never-the-last] */
             row.attempts = row.attempts + 1;
             assert(row.attempts < TRIES);                              /* R: the last try is the task's own */
             COUNT(assert(unpaid > 0)); COUNT(unpaid--)
          :: else -> explain()          /* of two owners the slower may hit the next try: its failure is free */
          fi;
          attempts = row.attempts; next_time = row.next_time
       :: else -> lost = 1                                              /* the next look reads the row again */
       fi
    :: else
    fi
  }
}

inline forget_entry() {
  d_step {
    remaining = 0; whose = 0; there = 0; lost = 0;
    status = 0; version = 0; attempts = 0; crashes = 0; next_time = 0
  }
}

inline move_entry() {
  atomic {
    if
    :: redis_up && UNTOUCHED && !lost ->                                /* [rule: whole-score] */
       if
       :: there && status == DEAD -> lua_bury(remaining, whose)
       :: there && status == PENDING -> lua_rollback(remaining, whose, next_time, rest_of(attempts))
       :: else -> lua_commit(remaining, whose)
       fi
    :: redis_up && !(UNTOUCHED && !lost)
#if CRASHES
    :: crashes_left -> crashes_left--; explain()                        /* its process dies here */
#endif
    fi
  }
}

proctype Reclaim(byte me) {
  unsigned remaining : 2, whose : 3;                         /* the entry as listed */
  unsigned status : 2, version : 2, attempts : 2, crashes : CRASH_BITS, next_time : 2;
  bit there, lost;

end:
  do
  :: atomic {
       if
       :: redis_up && prepare.there && !of_living(prepare.claim)            /* [rule: known-death] */
       :: redis_up && prepare.there && may_time_out(prepare.claim) && pauses_left ->
          pauses_left--; fault(); late[prepare.claim == claim[1]] = 1
#if RECLAIMERS == 2
       :: redis_up && prepare.there && of_living(prepare.claim) && prepare.listed == 3 - me  /* the same time-out */
#endif
       fi;
       remaining = prepare.remaining; whose = prepare.claim; prepare.listed = prepare.listed | me };

     d_step {
       there = row.there; status = row.status; version = row.version;
       attempts = row.attempts; crashes = row.crashes; next_time = row.next_time };

#ifndef INDEX_FIRST
     write_crash();
     atomic { move_entry(); forget_entry() }                 /* [rule: row-first] */
#else
     move_entry();
     write_crash();
     forget_entry()
#endif
  od
}

/* --- the sweep ---------------------------------------------------------------------------------------------- */

proctype Sweep() {
  unsigned due : 2, rest : 2;

end:
  do
  :: d_step { is_pending -> due = row.next_time; rest = rest_of(row.attempts) };
     d_step {
       if
       :: redis_up -> lua_add(due, rest)
       :: else
       fi;
       due = 0; rest = 0 }
#ifndef NO_RESTORE
  :: row.there && row.status == DEAD;                        /* [rule: dead-restored] */
     d_step {
       if
       :: redis_up -> lua_restore_dead()
       :: else
       fi }
#endif
  od
}

/* --- applications and operators ----------------------------------------------------------------------------- */

proctype Cancel() {
  unsigned calls : 2 = CANCELS;
  unsigned status : 2, version : 2;
  bit changed, attempted, told, due, prepared, started;

end:
  do
  :: d_step { calls && row.there ->                          /* the row first. [rule: row-first] */
       calls--;
       status = row.status; version = row.version; attempted = (row.attempts || row.crashes || row.begun);
       if
       :: is_pending ->
          row.status = CANCELLED; row.next_time = 0; terminal_is_final();
          changed = 1; cancelled_near = (now >= row.action_time)
       :: else
       fi };
     atomic {
       if
       :: status == PROCESSED || status == DEAD -> goto answered            /* TOO_LATE */
       :: else -> due = (now >= row.action_time)
       fi;
       if
       :: redis_up -> told = 1; prepared = prepare.there; drop_store()
       :: !redis_up
       :: calls -> goto answered                             /* its process dies halfway */
       fi };
     d_step {                                                /* [rule: honest-cancel] */
       if
       :: attempted -> started = 1
       :: !attempted && (!told || prepared) -> started = (version > 0 || (changed -> due : cancelled_near))
       :: !attempted && told && !prepared && changed && !due && version == 0
       :: else -> started = (row.attempts || row.begun)      /* who finishes it has marked the row first */
       fi };
     d_step {
       if
       :: started ->                                         /* MAY_HAVE_STARTED, also when asked again */
          assert(!(changed && version == 0 && now < row.action_time));
          if
          :: row.attempts == 0 -> row.attempts = 1
          :: else
          fi
       :: else ->                                            /* CANCELLED */
          assert(!ever || losses);                           /* never run, for any deadline, and never will: */
          quiet = 1
       fi;
       over = over || now < row.action_time };
answered:
     atomic { status = 0; version = 0; changed = 0; attempted = 0; told = 0; due = 0; prepared = 0; started = 0 }
  od
}

proctype Reschedule() {
  unsigned calls : 2 = RESCHEDULES;
  unsigned version : 2, attempts : 2, crashes : CRASH_BITS, before : 2, after : 2;
  bit started;

end:
  do
  :: calls && row.there ->
     calls--;
read:
     atomic {
       if
       :: is_pending && now < LAST -> after = LAST
       :: is_pending && now + 1 < LAST -> after = now + 1
       :: !is_pending || now == LAST -> goto answered        /* TOO_LATE; not in the future */
       fi;
       version = row.version; attempts = row.attempts; crashes = row.crashes };
     d_step {
       if
       :: is_pending && same_try ->
          before = row.action_time; started = (attempts || crashes);
          row.action_time = after; new_version(after)
       :: else -> after = 0
       fi };
     if
     :: after == 0 -> goto read
     :: else
     fi;
     atomic {
       if
       :: redis_up -> lua_reschedule(after)
       :: !redis_up
       :: true -> goto answered                              /* its process dies halfway */
       fi;
       started = (started || now >= before) };
     d_step {
       if
       :: started                                            /* MAY_HAVE_STARTED */
       :: else ->                                            /* RESCHEDULED */
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
  :: d_step { calls && row.there && row.status == DEAD ->
       calls--; row.status = PENDING; was = PENDING; new_version(now) };
     atomic {
       if
       :: redis_up -> lua_redrive(now)
       :: true                                               /* it dies here, or Redis is out of reach */
       fi }
  od
}

/* --- what happens to Redis ---------------------------------------------------------------------------------- */

inline loses() { losses++; explain() }

proctype Redis() {
  unsigned forgets : 2 = FORGETS, snapshots : 2 = SNAPSHOTS, outages : 2 = OUTAGES;
  bit saved, old_dead;
  Scheduled old_store;
  Prepared old_prepare;

end:
  do
#if FORGETS
  :: atomic { forgets && row.there -> forgets--; loses();
       if
       :: drop_store()
       :: drop_prepare()
       :: dead_queue = 0
       :: drop_store(); drop_prepare(); dead_queue = 0
       fi }
#endif
#if SNAPSHOTS
  :: d_step { snapshots && !saved && row.there -> saved = 1;
       old_store.there = store.there; old_store.due = store.due; old_store.rest = store.rest;
       old_prepare.there = prepare.there; old_prepare.remaining = prepare.remaining;
       old_prepare.claim = prepare.claim; old_dead = dead_queue }
  :: d_step { saved -> saved = 0; snapshots--; loses();
       store.there = old_store.there; store.due = old_store.due; store.rest = old_store.rest;
       prepare.there = old_prepare.there; prepare.remaining = old_prepare.remaining;
       prepare.claim = old_prepare.claim; prepare.listed = 0; dead_queue = old_dead;
       old_store.there = 0; old_store.due = 0; old_store.rest = 0;
       old_prepare.there = 0; old_prepare.remaining = 0; old_prepare.claim = 0; old_dead = 0 }
#endif
#if OUTAGES
  :: outages && redis_up -> redis_up = 0; outages--
  :: !redis_up -> redis_up = 1
#endif
  :: false
  od
}

/* --- all of it ---------------------------------------------------------------------------------------------- */

init {
  atomic {
    claim[0] = 0; claim[1] = 1; next_claim = 2;
    run Submit();
    run Worker(0);
    run Worker(1);
    run Reclaim(1);
#if RECLAIMERS == 2
    run Reclaim(2);
#endif
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

/* T: it settles. Whatever has happened, the task ends, and the index says nothing else. */
#define settled (row.there && row.status != PENDING && !store.there && !prepare.there && (row.status == DEAD -> dead_queue))
ltl settles { <> [] settled }
