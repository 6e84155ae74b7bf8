/* Life without Redis, for one task: leases on its row. README.md says what is modelled and what is not; toc.pml has
 * the protocol itself, of which only as much stands here as meets leases.
 *
 * Each worker loses Redis for itself, and perhaps never finds it again. What the code judges by seconds is judged
 * here by ticks: in a tick every living worker has asked for a lease of what it has checked, what was taken before
 * is too old to be started without one, and who owns the slot, or has lost Redis, has done so for long. A row check
 * may take longer than a tick.
 *
 * Two may take the slot for theirs: one that has lost its daemon works on beside the new owner, for good; one that
 * stood still does until its daemon has told it, which it has done within a tick.
 */

#ifndef CUTS
#define CUTS 1          /* times that each worker loses Redis */
#endif
#ifndef CRASHES
#define CRASHES 0       /* deaths of worker processes; their daemons tell at once, or nobody does */
#endif
#ifndef PAUSES
#define PAUSES 0        /* workers that are paused, for any time */
#endif
#ifndef MOVES
#define MOVES 0         /* the slot goes to the other worker, while the first keeps what it holds; from one that is
                           paused without its knowing */
#endif
#ifndef ORPHANS
#define ORPHANS 0       /* 1: the owner's daemon dies, the owner works on, and the slot goes to the other as well */
#endif
#ifndef HANDOVERS
#define HANDOVERS 0     /* each worker gives back what it has not started, in good order */
#endif
#ifndef FORGETS
#define FORGETS 0       /* Redis loses everything */
#endif
#ifndef CANCELS
#define CANCELS 0
#endif
#ifndef RESCHEDULES
#define RESCHEDULES 0
#endif

#define TRIES 2

/* Mutations: each drops one guard, and the search must find what goes wrong then. */
#ifdef NO_LEASE_OF_HELD
#define asks_in_time(w) true
#else
#define asks_in_time(w) ((asked[w] || !in_hand(w) || !in_time(w)) && !would_get(w))
#endif
#ifdef NO_FRESH_CHECK
#define FRESH true
#else
#define FRESH fresh[w]
#endif
#ifdef NO_ALONE_OR_LEASED
#define ALONE true
#else
#define ALONE !shared[w]
#endif
#ifdef NO_TAKES_ALONE
#define TAKES_ALONE true
#else
#define TAKES_ALONE !shared[w]
#endif
#ifdef NO_STOOD_STILL
#define stood_still() skip
#else
#define stood_still() shared[w] = 1
#endif
#ifdef NO_LEASED_ELSEWHERE
#define WAITS false
#else
#define WAITS (others_lease(w) && !row.gone)
#endif
#ifdef NO_RAN_OUT
#define RAN_OUT false
#else
#define RAN_OUT (others_lease(w) && row.gone)
#endif
#ifdef NO_MAY_ASK
#define FIRST true
#else
#ifdef NO_LATE_ASK
#define IN_TIME true
#else
#define IN_TIME !late[w]
#endif
#ifdef NO_RENEW_ONLY
#define RENEW_ONLY (stage[w] == READY && !leased[w])
#else
#define RENEW_ONLY true
#endif
#define FIRST ((fenced[w] && IN_TIME) || !RENEW_ONLY)
#endif
#ifdef NO_ASK_AGAIN
#define would_get(x) false
#else                   /* it has no lease, and gets one as soon as it asks again. [rule: asked-again] */
#define would_get(x) (in_hand(x) && in_time(x) && !leased[x] && row.status == PENDING && (row.lease == NOBODY || row.lease == x + 1))
#endif
#ifdef NO_GIVING_UP
#define holds_in_vain(x) false
#define GIVES_UP false
#else                   /* it has a lease and will not start: its entry is gone. It gives that up. [rule: lease-given-up] */
#define holds_in_vain(x) ((stage[x] == READY || stage[x] == LEAVING) && fenced[x] && row.lease == x + 1 && \
                          !(prepare.there && prepare.claim == x + 1))
#define GIVES_UP true
#endif
#ifdef NO_COVER
#define COVERED true
#else                   /* what waited long for its row is not let go before it was asked for a lease */
#define COVERED (asked[w] || !fenced[w] || late[w])
#endif
#ifdef NO_CRASH_FREE
#define CRASH_FREE (!others_lease(w) || row.gone)
#else
#define CRASH_FREE (row.lease == NOBODY || row.gone)
#endif
#ifdef NO_OWNED_LONG
#define OWNED_LONG true
#else
#define OWNED_LONG (owned_long || owner != w)
#endif
#ifdef NO_LEASE_FIRST
#define UNTAKEN true
#else
#define UNTAKEN (row.lease == NOBODY)
#endif
#ifdef NO_FAILURE_WAITS
#define UNDECIDED false
#else                   /* only the other's lease stands against the failure, and it may end without a try. [rule: failure-waits] */
#define UNDECIDED (row.status == PENDING && same_try && others_lease(w) && !row.gone)
#endif
#ifdef NO_LEASE_IS_TRIED
#define IS_LEASED false
#else
#define IS_LEASED (row.lease != NOBODY)
#endif

/* --- the row, the index, the workers as others see them ------------------------------------------------------- */

#define PENDING   0
#define DEAD      1
#define PROCESSED 2
#define CANCELLED 3

#define NOBODY  0
#define OF_DEAD 3       /* else 1 + worker */

typedef Row {
  unsigned status : 2;
  unsigned version : 2;
  unsigned attempts : 2;
  unsigned crashes : 2;
  bit due;
  unsigned lease : 2;
  bit gone              /* the lease has run out, or its owner is known to be dead */
}
Row row;

bit store;              /* the StoreQueue entry */
unsigned left : 2;      /* its tries left */

typedef Prepared {
  bit there;
  unsigned remaining : 2;
  unsigned claim : 2;   /* 1 + worker; OF_DEAD */
  bit listed            /* reclaim has listed it, and nobody has kept it alive since */
}
Prepared prepare;

#define IDLE    0
#define TAKEN   1
#define READY   2
#define RUNNING 3
#define DONE    4
#define FAILED  5
#define LEAVING 6

byte stage[2];
byte ver[2];            /* the version that its row check has read */
bit fenced[2];          /* what it holds stands in the PrepareQueue under its claim, as far as it knows */
bit leased[2];          /* its lease on the row has not run out by its own clock */
bit asked[2];           /* it has asked for a lease of what it holds */
bit fresh[2];           /* what it holds was taken, or found to stand, not long ago */
bit late[2];            /* prepare_timeout has passed since it last kept its entry alive */
bit cut[2], out[2];     /* Redis does not answer it; and has not for long */
bit paused[2];
bit excused[2];         /* its try may run beside another: it was paused, Redis forgot it before it had a lease, or it
                           has run beside another */
bit owner, owned_long = 1;  /* who is to have the slot, and whether for long */
bit owns[2];            /* the worker takes the slot for its own */
bit orphan[2];          /* its daemon is gone: it is never told that the slot is not its own any more */
bit shared[2];          /* it knows that others may have the slot too */
unsigned crashes_left : 2 = CRASHES, pauses_left : 2 = PAUSES;

#define in_hand(w)        (stage[w] >= READY && stage[w] <= FAILED)
#define in_time(w)        (fenced[w] && !late[w])
/* Nobody has kept its entry alive for prepare_timeout. Within that, whoever had a lease in vain while it was refused one has
 * given that up, as it was in time for the last time before this entry was taken; and this one has asked again. */
#define silent(x)         (out[x] && cut[x] && !fresh[x] && !would_get(x) && !holds_in_vain(1 - (x)))
#define others_lease(w)   (row.lease != NOBODY && row.lease != w + 1)
#define tries_left(used)  (used >= TRIES -> 1 : TRIES - used)
#define stands(tries, of) (prepare.there && prepare.remaining == tries && prepare.claim == of)
#define told(w)           (paused[w] || orphan[w] || !owns[w] || owner == w)
#define same_try          (row.version == ver[w] && row.attempts == attempts && row.crashes == crashes)

inline drop_store() { store = 0; left = 0 }
inline drop_prepare() { prepare.there = 0; prepare.remaining = 0; prepare.claim = 0; prepare.listed = 0 }
inline zadd(n) { if :: !store || n < left -> store = 1; left = n :: else fi }
inline no_lease() { row.lease = NOBODY; row.gone = 0 }

/* --- what the properties are told by ---------------------------------------------------------------------------- */

unsigned newest : 2;    /* 1 + the worker whose handler started last */
unsigned was : 2;       /* the row's status after the last step that changed it */
bit ran, ran_before;    /* a handler has started for this version; for the one before it */
bit quiet;              /* a cancel has answered CANCELLED */
bit moved;              /* the reschedule has answered RESCHEDULED */
bit blind;              /* Redis has forgotten a try that had no lease yet: nobody can tell that it runs */

#define is_live(x) (stage[x] >= RUNNING && stage[x] <= FAILED)

inline starts() {
  assert(row.due || row.version != ver[w]);                  /* E: never early */
  assert(!quiet || blind);                                   /* C: cancel holds */
  assert(!(moved && ver[w] + 1 == row.version) || blind);
  assert(!(is_live(1 - w) && ver[1 - w] == ver[w]) || excused[0] || excused[1]);  /* D: no two at once */
  if
  :: is_live(1 - w) && ver[1 - w] == ver[w] ->               /* they had an excuse: there is one lease for the two */
     excused[1 - w] = 1; excused[w] = excused[w] || blind
  :: else
  fi;
  newest = w + 1;
  ran = ran || ver[w] == row.version;
  ran_before = ran_before || ver[w] + 1 == row.version
}

inline terminal_is_final() { assert(was == PENDING || row.status == was); was = row.status }

/* --- a worker ---------------------------------------------------------------------------------------------------- */

inline forget_row() { attempts = 0; crashes = 0; ver[w] = 0 }
inline let_go() {
  stage[w] = IDLE; fenced[w] = 0; leased[w] = 0; asked[w] = 0; fresh[w] = 0; late[w] = 0; excused[w] = 0;
  remaining = 0; back = 0; begun = 0; forget_row()
}

/* What the row says of an entry that is still there under its fence. */
inline move_as_row_says(tries) {
  if
  :: stands(tries, w + 1) ->
     if
     :: row.status == PENDING -> zadd(tries_left(row.attempts))
     :: else
     fi;
     drop_prepare()
  :: else
  fi
}

inline charge_crash(uncharged) {
  row.crashes = (row.crashes < 3 -> row.crashes + 1 : 3);
  if
  :: uncharged && row.attempts < TRIES - 1 -> row.attempts = row.attempts + 1
  :: else
  fi;
  no_lease()
}

proctype Worker(bit w) {
  unsigned remaining : 2;
  unsigned attempts : 2, crashes : 2;
  bit begun;                    /* what it holds has started */
  bit back;                     /* LEAVING: it goes back, without a try */
  bit moving;                   /* a move that is tried again */
  unsigned moving_left : 2;
  unsigned cuts : 2 = CUTS, handovers : 2 = HANDOVERS;

end:
  do
     /* poll: prepare */
  :: d_step { !paused[w] && !cut[w] && owns[w] && store && !moving ->
       if
       :: prepare.there
       :: else ->
          prepare.there = 1; prepare.claim = w + 1; prepare.remaining = left; prepare.listed = 0;
          if
          :: !begun -> stage[w] = TAKEN; back = 0; fresh[w] = 1; forget_row()
          :: else               /* a try runs here, or has ended: it goes on under this fence */
          fi;
          fenced[w] = 1; remaining = left; late[w] = 0
       fi;
       drop_store() }

     /* ... adopt what stands under its claim and is not held */
  :: d_step { !paused[w] && !cut[w] && owns[w] && stage[w] == IDLE && !moving && prepare.there && prepare.claim == w + 1 ->
       prepare.listed = 0; fenced[w] = 1; remaining = prepare.remaining; fresh[w] = 1; stage[w] = TAKEN }

     /* the row check */
  :: d_step { !paused[w] && stage[w] == TAKEN ->
       if
       :: row.status != PENDING || !row.due -> stage[w] = LEAVING
       :: row.status == PENDING && row.due && WAITS ->                                  /* [rule: leased-elsewhere] */
          back = 1; stage[w] = LEAVING
       :: row.status == PENDING && row.due && !WAITS && RAN_OUT ->                      /* [rule: lease-ran-out] */
          charge_crash(true); back = 1; stage[w] = LEAVING
       :: row.status == PENDING && row.due && !WAITS && !RAN_OUT ->
#ifdef FRESH_FROM_CHECK
          fresh[w] = 1;
#endif
          ver[w] = row.version; attempts = row.attempts; crashes = row.crashes; stage[w] = READY
       fi }

     /* the keeper of leases: what is held for a while has one; renewed before it runs out. What was taken without
      * Redis, or was not kept alive there in time, has one or never gets it, [rule: first-lease] whether it waits or runs:
      * it only renews. [rule: renew-only] */
  :: d_step { !paused[w] && in_hand(w) && (FIRST || leased[w] || (stage[w] != READY && row.lease == w + 1)) &&
              (!asked[w] || (leased[w] && (row.lease != w + 1 || row.gone)) ||
               (!leased[w] && row.status == PENDING && (row.lease == NOBODY || row.lease == w + 1))) ->
       asked[w] = 1;                                         /* [rule: lease-of-held] */
#ifndef NO_LEASE_OF_HELD
       if
       :: row.status == PENDING && (row.lease == w + 1 || (row.lease == NOBODY && FIRST)) ->
          row.lease = w + 1; row.gone = 0; leased[w] = 1
       :: else -> leased[w] = 0
       fi
#endif
     }

     /* keep alive */
  :: d_step { !paused[w] && stage[w] != IDLE && fenced[w] && !cut[w] &&
              (prepare.listed || late[w] == stands(remaining, w + 1)) ->
       late[w] = !stands(remaining, w + 1);
       if
       :: late[w]
       :: else -> prepare.listed = 0
       fi }

     /* ... or not in time, by its own clock */
  :: d_step { !paused[w] && stage[w] != IDLE && fenced[w] && !late[w] && silent(w) -> late[w] = 1 }

     /* start, or go back, without the lease that it may have.
      * [rule: fresh-or-leased] [rule: covered] Who may not have the slot alone starts nothing without a lease. [rule: alone-or-leased] */
  :: atomic { !paused[w] && stage[w] == READY && !(fenced[w] && late[w]) && ((fenced[w] && FRESH && ALONE) || leased[w]) ->
       starts(); begun = 1; stage[w] = RUNNING }
  :: d_step { !paused[w] && stage[w] == READY && COVERED &&
              ((fenced[w] && late[w]) || !((fenced[w] && FRESH && ALONE) || leased[w])) ->
       if
       :: GIVES_UP -> back = 1; stage[w] = LEAVING
       :: else -> let_go()
       fi }

  :: !paused[w] && stage[w] == RUNNING -> stage[w] = DONE
  :: !paused[w] && stage[w] == RUNNING -> stage[w] = FAILED

  :: atomic { !paused[w] && stage[w] == DONE ->
       if
       :: row.status == PENDING && row.version == ver[w] -> row.status = PROCESSED; terminal_is_final()
       :: row.status == CANCELLED && row.attempts == 0 -> row.attempts = 1
       :: else -> back = 1
       fi;
       stage[w] = LEAVING }

  :: atomic { !paused[w] && stage[w] == FAILED && !UNDECIDED ->
       if
       :: row.status == PENDING && same_try && (!others_lease(w) || row.gone) ->        /* [rule: lease-fence] */
          assert(newest == w + 1 || excused[0] || excused[1] || blind);
          row.attempts = row.attempts + 1; row.crashes = 0; no_lease(); leased[w] = 0;
          if
          :: row.attempts < TRIES
          :: row.status = DEAD
          fi;
          terminal_is_final()
       :: row.status == CANCELLED && row.attempts == 0 -> row.attempts = 1
       :: else -> assert(row.status != PENDING || !same_try); back = 1                  /* R: charged, or another is */
       fi;
       stage[w] = LEAVING }

     /* what goes back gives up its lease first, while it is held. [rule: lease-released] */
  :: d_step { !paused[w] && stage[w] == LEAVING && back && row.lease == w + 1 ->
       no_lease(); leased[w] = 0; asked[w] = 0 }
  :: d_step { !paused[w] && stage[w] == LEAVING && !moving && !(back && leased[w] && row.lease == w + 1) ->
       if
       :: fenced[w] && !cut[w] -> move_as_row_says(remaining)
       :: fenced[w] && cut[w] -> moving = 1; moving_left = remaining
       :: else
       fi;
       let_go() }
  :: d_step { moving && !paused[w] && (stage[w] != IDLE || !cut[w]) ->
       if
       :: stage[w] == IDLE -> move_as_row_says(moving_left)
       :: else                  /* taken anew */
       fi;
       moving = 0; moving_left = 0 }

     /* without Redis: what is due and free is taken under a lease, then checked as ever. [rule: taken-by-lease]
      * Only by who has owned the slot for long, [rule: owned-long] and has it alone. [rule: takes-alone] */
  :: d_step { !paused[w] && out[w] && owns[w] && OWNED_LONG && TAKES_ALONE && stage[w] == IDLE && !moving &&
              row.status == PENDING && row.due && (UNTAKEN || (others_lease(w) && row.gone)) ->
       if
       :: UNTAKEN -> row.lease = w + 1; row.gone = 0; leased[w] = 1; asked[w] = 1
       :: else                  /* the row check charges the crash */
       fi;
       stage[w] = TAKEN }

#if HANDOVERS
  :: d_step { handovers && !paused[w] && stage[w] == READY -> handovers--; back = 1; stage[w] = LEAVING }
#endif

     /* faults */
#if MOVES && PAUSES
  :: d_step { !paused[w] && !told(w) -> owns[w] = 0 }
#endif
  :: cuts && !cut[w] -> cuts--; cut[w] = 1
  :: cut[w] -> cut[w] = 0       /* or never: fairness does not ask for it */
#if PAUSES
  :: d_step { pauses_left && !paused[w] && stage[w] != IDLE ->
       pauses_left--; paused[w] = 1; excused[w] = is_live(w) }
  :: atomic { paused[w] ->      /* it wakes up after any time: its clocks tell */
       paused[w] = 0; fresh[w] = 0;
#if MOVES
       if                       /* for so long that others may have the slot. [rule: stood-still] */
       :: owns[w] -> stood_still()
       :: !owns[w] || owner == w
       fi;
#endif
       if
       :: row.lease == w + 1 && !row.gone
       :: leased[w] = 0; asked[w] = 0
       fi;
       if
       :: fenced[w] -> late[w] = 1
       :: stands(remaining, w + 1) && !prepare.listed
       :: !fenced[w]
       fi }
#endif
#if CRASHES
  :: d_step { crashes_left && stage[w] != IDLE -> crashes_left--;
       if
       :: row.lease == w + 1 -> row.lease = OF_DEAD; row.gone = 0
       :: else
       fi;
       if
       :: prepare.there && prepare.claim == w + 1 -> prepare.claim = OF_DEAD
       :: else
       fi;
       moving = 0; moving_left = 0; paused[w] = 0; let_go() }
#endif
  od
}

/* --- whoever else acts ------------------------------------------------------------------------------------------- */

/* The owner of the slot gives back what has timed out, or what the dead have left; not what it holds itself. */
#define may_reclaim(x) (owns[x] && !cut[x] && !paused[x] && prepare.claim != x + 1 && stage[x] == IDLE)

proctype Reclaim() {
  unsigned remaining : 2, whose : 2, status : 2, version : 2, attempts : 2, crashes : 2;
  bit w, leased_elsewhere, lost;

end:
  do
  :: atomic { prepare.there && (may_reclaim(0) || may_reclaim(1)) && (prepare.claim == OF_DEAD || paused[prepare.claim - 1] ||
               silent((prepare.claim - 1))) ->
       if
       :: may_reclaim(0) -> w = 0
       :: may_reclaim(1) -> w = 1
       fi;
       remaining = prepare.remaining; whose = prepare.claim; prepare.listed = 1;
       if
       :: whose != OF_DEAD -> late[whose - 1] = 1
       :: else
       fi };
     d_step {
       status = row.status; version = row.version; attempts = row.attempts; crashes = row.crashes;
       leased_elsewhere = (others_lease(w) && !row.gone) };
     d_step {
       if
       :: status == PENDING && row.due && !leased_elsewhere ->
          if                                                 /* nor if it has leased it itself since. [rule: crash-unleased] */
          :: row.status == PENDING && row.version == version && row.attempts == attempts && row.crashes == crashes &&
             CRASH_FREE -> charge_crash(attempts <= TRIES - remaining)
          :: else -> lost = 1
          fi
       :: status == CANCELLED && row.attempts == 0 -> row.attempts = 1
       :: else                                               /* it runs there: it waits. [rule: reclaim-waits] */
       fi };
     d_step {
       if
       :: !lost && stands(remaining, whose) && prepare.listed ->
          if
          :: status == PENDING -> zadd(tries_left(row.attempts))
          :: else
          fi;
          drop_prepare()
       :: else
       fi;
       w = 0; remaining = 0; whose = 0; status = 0; version = 0; attempts = 0; crashes = 0; leased_elsewhere = 0; lost = 0 }
  od
}

proctype Sweep() {
end:
  do
  :: d_step { row.status == PENDING && !prepare.there && !store -> zadd(tries_left(row.attempts)) }
  od
}

proctype Time() {
end:
  do
  :: d_step { (paused[0] || asks_in_time(0)) && (paused[1] || asks_in_time(1)) && told(0) && told(1) &&
              (fresh[0] || fresh[1] || !owned_long || out[0] != cut[0] || out[1] != cut[1] ||
               shared[0] != orphan[0] || shared[1] != orphan[1]) ->
       fresh[0] = 0; fresh[1] = 0; owned_long = 1; out[0] = cut[0]; out[1] = cut[1];
       shared[0] = orphan[0]; shared[1] = orphan[1] }
  :: !row.due -> row.due = 1
  od
}

#if CRASHES || PAUSES || MOVES || ORPHANS
proctype Leases() {
end:
  do
  :: d_step { row.lease == OF_DEAD && !row.gone -> row.gone = 1 }
     /* nobody renews it: who had it was refused the start, as it was late */
  :: d_step { row.lease != NOBODY && row.lease != OF_DEAD && !leased[row.lease - 1] && !row.gone -> row.gone = 1 }
#if PAUSES
  :: d_step { row.lease != NOBODY && row.lease != OF_DEAD && paused[row.lease - 1] && !row.gone -> row.gone = 1 }
#endif
  od
}
#endif

#if MOVES || ORPHANS
proctype Coordinator() {
  unsigned moves : 2 = MOVES, orphans : 1 = ORPHANS;

end:
  do
  :: d_step { moves && !orphan[0] && !orphan[1] -> moves--;
       owns[owner] = (paused[owner] || shared[owner]);       /* it does not know yet */
       owner = 1 - owner; owns[owner] = 1; owned_long = 0 }
#if ORPHANS
  :: d_step { orphans && !shared[1 - owner] -> orphans--; orphan[owner] = 1; shared[owner] = 1 }
  :: d_step { orphan[owner] -> owner = 1 - owner; owns[owner] = 1; owned_long = 0 }
#endif
  od
}
#endif

#if FORGETS
proctype Redis() {
  d_step {
    drop_store(); drop_prepare();
    if                          /* nobody can tell that it is held */
    :: !leased[0] && stage[0] != IDLE -> excused[0] = 1; blind = 1
    :: else
    fi;
    if
    :: !leased[1] && stage[1] != IDLE -> excused[1] = 1; blind = 1
    :: else
    fi }
}
#endif

#if CANCELS
proctype Cancel() {
  unsigned status : 2;
  bit attempted;

  d_step { status = row.status; attempted = (row.attempts || row.crashes || row.version || IS_LEASED);   /* [rule: lease-is-tried] */
    if
    :: status == PENDING ->
       row.status = CANCELLED; was = CANCELLED;
       if
       :: IS_LEASED && row.attempts == 0 -> row.attempts = 1
       :: else
       fi
    :: else
    fi };
  d_step { attempted = attempted || prepare.there; drop_store() };
  atomic {
    if
    :: status == PENDING && !attempted && row.attempts == 0 -> assert(!ran || blind); quiet = 1    /* CANCELLED */
    :: else
    fi }
}
#endif

#if RESCHEDULES
proctype Reschedule() {
  bit pending, started, before;

  atomic {                      /* read and written under the pair that was read, and the lease unless there was one */
    if
    :: row.status == PENDING ->
       before = row.due; started = (row.attempts || row.crashes || IS_LEASED || before);
       row.version = row.version + 1; row.attempts = 0; row.crashes = 0; row.due = 0;
       ran_before = ran; ran = 0; pending = 1
    :: else
    fi };
  atomic {
    if
    :: pending && !prepare.there -> store = 1; left = TRIES
    :: else
    fi };
  atomic {
    if
    :: pending && !started -> assert(!ran_before || blind); moved = 1                   /* RESCHEDULED */
    :: else
    fi }
}
#endif

init {
  atomic {
    store = 1; left = TRIES; row.due = 1; owns[0] = 1;
    run Worker(0);
    run Worker(1);
    run Reclaim();
    run Sweep();
    run Time();
#if CRASHES || PAUSES || MOVES || ORPHANS
    run Leases();
#endif
#if MOVES || ORPHANS
    run Coordinator();
#endif
#if FORGETS
    run Redis();
#endif
#if CANCELS
    run Cancel();
#endif
#if RESCHEDULES
    run Reschedule();
#endif
    skip
  }
}

/* T: whoever has lost Redis, and for how long: the task ends. */
ltl settles { <> [] (row.status != PENDING) }
