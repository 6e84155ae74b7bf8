/* Pull consumers, for one task: what is handed out, and how a hand-out ends. README.md says what is modelled.
 *
 *     waiting ──hand-out──▶ leased ──ack──▶ processed
 *        ▲                   │ │ └─ the end of ttr ─▶ lapsed ──hand-out──▶ leased
 *        ├── release, nack ──┘ └─ extend               └── last try ──▶ dead
 *
 * A hand-out is one guarded statement. Its number stands for the nonce. ``row.due`` is whether next_time has come:
 * while a row has a nonce and is not due, its lease lives. Gateways may be killed, or stand still for any time,
 * between any two steps; clients may use any lease that they were given, at any later time.
 */

#ifndef CRASHES
#define CRASHES 0       /* deaths of gateways */
#endif
#ifndef RECLAIMS
#define RECLAIMS 1      /* times that an entry is taken for one of a dead gateway although its gateway lives */
#endif
#ifndef CANCELS
#define CANCELS 0
#endif
#ifndef RESCHEDULES
#define RESCHEDULES 0   /* a replace is one, as far as leases go */
#endif
#ifndef FORGETS
#define FORGETS 0       /* Redis loses everything */
#endif
#ifndef OUTAGES
#define OUTAGES 0       /* 1: gateways may take from the rows at any time, as if Redis were away */
#endif
#ifndef EXTENDS
#define EXTENDS 1
#endif

#define TRIES 2
#ifndef LEASES
#define LEASES 4        /* hand-outs at most; a run that wants more stops there */
#endif

/* Mutations: each drops one guard, and the search must find what goes wrong then. */
#ifdef NO_DUE_GUARD
#define HAS_COME true
#else
#define HAS_COME row.due
#endif
#ifdef NO_STATUS_GUARD
#define OPEN true
#else
#define OPEN (row.status == PENDING)
#endif
#ifdef NO_VERSION_GUARD
#define OF_VERSION(n) true
#else
#define OF_VERSION(n) (row.version == version[n])
#endif
#ifdef NO_NONCE_GUARD
#define LIVES(n) (row.nonce != 0 && !row.due)
#else
#ifdef NO_LIVING_GUARD
#define LIVES(n) (row.nonce == n)
#else
#define LIVES(n) (row.nonce == n && !row.due)
#endif
#endif
#ifdef NO_LAPSE_FENCE
#define UNCHANGED(n) true
#else
#define UNCHANGED(n) (row.nonce == n && row.due)
#endif
#ifdef NO_CONSUMER_FIRST
#define AT_ONCE 1
#else
#define AT_ONCE 0
#endif

#define PENDING 0
#define PROCESSED 1
#define CANCELLED 2
#define DEAD 3

#define ABSENT 0
#define LATER 1         /* a StoreQueue entry that is not due */
#define DUE 2

typedef Row {
  unsigned status : 2;
  bit due;
  unsigned attempts : 2;
  unsigned version : 1;
  unsigned nonce : 3;   /* 0: none */
}
Row row;

unsigned store : 2;     /* the StoreQueue entry */
bit prepared;           /* the PrepareQueue entry */
bit fence;              /* whose it is */

/* of each hand-out */
bit given[5];  /* a client has it */
bit over[5];   /* its try has ended */
bit version[5];
unsigned drawn : 3;

unsigned reclaims : 2 = RECLAIMS;
unsigned crashes : 2 = CRASHES;
unsigned extends : 2 = EXTENDS;
bit ended[2];           /* by version: the task has ended */
bit busy;               /* the ttr of a lease that a new deadline has ended is not over */

/* The end of ttr was that of the last try. */
#define LAST (row.status == PENDING && row.due && row.nonce != 0 && row.attempts >= TRIES)

/* Who ends a task finds it open, and ends it once. */
inline ends(how) {
  assert(row.status == PENDING);
  assert(!ended[row.version]);
  ended[row.version] = 1;
  row.status = how
}

/* The try of a hand-out ends once. */
inline try_ends(lease) { assert(!over[lease]); over[lease] = 1 }

/* What is prepared goes back, or away. */
inline moves(g, where) {
  if
  :: prepared && fence == g -> prepared = 0;
     if
     :: store == ABSENT || where > store -> store = where
     :: else
     fi
  :: else
  fi
}

proctype Gateway(bit g) {
  unsigned n : 3;
  bit won, last;

end:
  do
  :: row.status != PENDING && !prepared && store == ABSENT -> break
  :: drawn == LEASES -> break
  :: atomic {                   /* prepare */
       store == DUE && !prepared && drawn < LEASES -> store = ABSENT; prepared = 1; fence = g };
hand_out:
     atomic {                   /* the hand-out, and the look at the row, in one transaction [rule: one-hand-out] */
       won = 0; last = 0;
       if
       :: drawn < LEASES && OPEN && HAS_COME && (row.nonce == 0 || row.attempts < TRIES) ->
          if
          :: row.nonce != 0 -> assert(row.due); try_ends(row.nonce)      /* never before ttr has ended */
          :: else
          fi;
          assert(row.status == PENDING);
          assert(!busy);                                                 /* nobody else has it */
          drawn = drawn + 1; n = drawn; won = 1;
          version[n] = row.version;
          if
          :: row.attempts < TRIES -> row.attempts = row.attempts + 1
          :: else
          fi;
          row.nonce = n; row.due = 0
       :: else -> last = LAST
       fi };
     if
     :: atomic { won && crashes -> crashes--; goto dead }      /* nobody has heard of it: redelivered at ttr */
     :: won ->                  /* the whole answer may reach the client, a part of it, nothing */
        if
        :: atomic { given[n] = 1 }
        :: skip                 /* broken off: nobody knows what the client has read */
        :: atomic {             /* the client left before a byte was sent: uncharged, due at once [rule: released-uncharged] */
             skip;
             if
             :: OPEN && OF_VERSION(n) && LIVES(n) ->
                try_ends(n); row.attempts = row.attempts - 1; row.nonce = 0; row.due = 1
             :: else
             fi }
        fi
     :: else
     fi;
     if
     :: atomic { crashes -> crashes--; goto dead }
     :: atomic {                /* the entry goes where the row says; only while it is this gateway's [rule: pulled-by-row] */
       if
       :: row.status != PENDING || last -> if :: prepared && fence == g -> prepared = 0 :: else fi
       :: row.status == DEAD                              /* it stays: reclaim buries it */
       :: row.status == PENDING && row.due && !last -> moves(g, DUE)
       :: row.status == PENDING && !row.due && !last -> moves(g, LATER)
       fi }
     fi;
dead:
     atomic { won = 0; last = 0; n = 0 }
#if OUTAGES
  :: row.status == PENDING && row.due && drawn < LEASES -> goto hand_out      /* a due row, without its entry */
#endif
  od
}

/* A client that has lease n, whatever has become of it. */
inline client(lease) {
  if
  :: given[lease] ->
     if
     :: atomic {                /* ack, also late [rule: ack-of-version] */
          skip;
          if
          :: OPEN && OF_VERSION(lease) && row.attempts > 0 ->
             assert(row.version == version[lease]);
             if
             :: row.nonce == lease -> try_ends(lease)
             :: else
             fi;
             ends(PROCESSED); store = ABSENT
          :: else
          fi }
     :: atomic {                /* nack needs the living lease [rule: living-lease] */
          skip;
          if
          :: OPEN && OF_VERSION(lease) && LIVES(lease) ->
             assert(row.version == version[lease]); assert(row.nonce == lease); assert(!row.due);
             try_ends(lease);
             if
             :: row.attempts >= TRIES -> ends(DEAD); store = ABSENT
             :: row.attempts < TRIES -> row.nonce = 0; row.due = 1; if :: !prepared -> store = DUE :: else fi
             fi
          :: else
          fi }
     :: atomic {                /* extend: it lives on; the entry may stay too early */
          extends && OPEN && OF_VERSION(lease) && LIVES(lease) -> extends--;
          assert(row.nonce == lease); assert(!over[lease]) }
     fi
  :: else
  fi
}

/* Clients may never come back: they are no part of what has to go on. */
active proctype Clients() {
end:
  do
  :: row.status == PENDING && given[1] -> client(1)
  :: row.status == PENDING && given[2] -> client(2)
  :: row.status == PENDING && given[3] -> client(3)
  :: row.status == PENDING && given[4] -> client(4)
  :: row.status != PENDING -> break
  od
}

/* The next_time of row and entry comes; once the entry is the earlier one, as after an extend. */
active proctype Time() {
  bit early = 1;

end:
  do
  :: atomic { row.status == PENDING && !row.due -> row.due = 1; busy = 0; if :: store == LATER -> store = DUE :: else fi }
  :: atomic { store == LATER && (row.due || row.status != PENDING) -> store = DUE }
  :: atomic { store == LATER && early -> early = 0; store = DUE }
  :: row.status != PENDING && store != LATER -> break
  od
}

/* What was prepared long ago goes back as due: its row says more [rule: pull-given-back] */
active proctype Reclaim() {
end:
  do
#ifndef NO_RECLAIM
  :: atomic { prepared && (crashes < CRASHES || FORGETS) -> prepared = 0; store = DUE }
#endif
  :: atomic { prepared && reclaims -> reclaims--; prepared = 0; store = DUE }
  :: row.status != PENDING && !prepared -> break
  od
}

/* Adds what is due and has no entry, unless its last try is over: then it ends it, with or without an entry. */
active proctype Sweep() {
  unsigned seen : 3;

end:
  do
#ifndef NO_SWEEP
  :: atomic { row.status == PENDING && !prepared && store == ABSENT && row.due && !LAST -> store = DUE }
  :: atomic { row.status == PENDING && !prepared && store == LATER && row.due && !LAST -> store = DUE }
#endif
#ifndef NO_SWEEP_ENDS
  :: atomic { LAST -> seen = row.nonce };
     atomic {                   /* [rule: last-lapse] */
       if
       :: row.status == PENDING && UNCHANGED(seen) ->
          assert(row.nonce != 0); assert(row.due);
          try_ends(row.nonce); ends(DEAD)
       :: else
       fi;
       seen = 0 }
#endif
  :: row.status != PENDING -> break
  od
}

#if CANCELS
active proctype Cancel() {
  atomic {
    if
    :: row.status == PENDING -> ends(CANCELLED)
    :: else
    fi };
  store = ABSENT
}
#endif

#if RESCHEDULES
active proctype Reschedule() {
  atomic {
    if
    :: row.status == PENDING ->
       busy = (row.nonce != 0 && !row.due);
       /* the new time comes not before the ttr is over [rule: consumer-first] */
       row.version = 1; row.attempts = 0; row.nonce = 0; row.due = AT_ONCE
    :: else
    fi };
  atomic {
    if
    :: row.status == PENDING && !prepared -> store = LATER
    :: else
    fi }
}
#endif

#if FORGETS
active proctype Redis() {
  atomic { store = ABSENT; prepared = 0 }
}
#endif

init {
  atomic { store = DUE; row.due = 1; run Gateway(0); run Gateway(1) }
}

/* The task ends, whatever becomes of gateways and entries; or has been handed out as often as the model can. */
ltl settles { <> [] (row.status != PENDING || drawn == LEASES) }
