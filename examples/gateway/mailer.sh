#!/bin/sh
# Produces and consumes tasks over HTTP with curl, and sed to read the answers.
#
#   ./mailer.sh produce ada grace     submits a mail to each, due in a second
#   ./mailer.sh consume               sends what is due, until SIGTERM or Ctrl-C

TOPIC=${TOPIC:-mail.send}

ANSWER=$(mktemp)
trap 'rm -f "$ANSWER"' EXIT

# Make a call. $3: how the answer to a success begins. curl tries again when the gateway is away or busy, by
# its Retry-After, or its answer was lost.
api() {
    path=$1 body=$2 good=$3
    shift 3
    curl -sS --max-time 90 --retry 8 --retry-connrefused --retry-all-errors -o "$ANSWER" \
        -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" "$@" \
        -d "$body" "$TOC/v1/$path" || exit
    case $(cat "$ANSWER") in
    "$good"*) cat "$ANSWER" ;;
    *) cat "$ANSWER" >&2 && exit 1 ;;
    esac
}

field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }

produce() {
    # Repeated after a lost answer, it gives the same task.
    task="{\"biz_id\": \"$1\", \"delay\": 1, \"attribute\": {\"to\": \"$1\"}, \"dedup_key\": \"welcome-$1\"}"
    made=$(api "topics/$TOPIC/tasks" "$task" '{"job_id"' -H "Idempotency-Key: welcome-$1") || exit
    echo "submitted $(echo "$made" | field job_id)"
}

consume() {
    stopping=
    trap 'stopping=1' TERM INT # what runs ends first: a pull waits for 5 s at most
    while [ -z "$stopping" ]; do
        task=$(api "topics/$TOPIC:pull" '{"wait": 5, "ttr": 60}' '{"tasks"') || exit
        lease=$(echo "$task" | field lease)
        [ -n "$lease" ] || continue
        # A task may come twice: its job_id tells.
        echo "sent $(echo "$task" | field to) $(echo "$task" | field job_id)"
        api leases:ack "{\"lease\": \"$lease\"}" '{"lease"' > /dev/null || exit
    done
}

what=$1
shift
case $what in
consume) consume ;;
produce) for name in "$@"; do produce "$name"; done ;;
esac
