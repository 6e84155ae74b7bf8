#!/bin/sh
# Makes a cluster of the nodes whose addresses are given, unless they are one; waits until it serves.
set -eu
REDISCLI_AUTH=$(cat /run/secrets/redis_admin_password)
export REDISCLI_AUTH

info() { redis-cli --user admin -h "$1" cluster info | tr -d '\r'; }

case $(info "$1") in *cluster_slots_assigned:0*)
    nodes=
    for address in "$@"; do nodes="$nodes $address:6379"; done
    # shellcheck disable=SC2086 # a list of words
    redis-cli --user admin --cluster create $nodes --cluster-yes
    ;;
esac
for _ in $(seq 30); do
    case $(info "$1") in *cluster_state:ok*cluster_slots_assigned:16384*) exit 0 ;; esac
    sleep 1
done
info "$1"
exit 1
