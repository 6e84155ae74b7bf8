#!/bin/sh
# Starts a Redis node with the accounts of redis-acl.conf. The passwords' hashes are given to sed and to Redis on
# standard input: not in arguments, not in a file.
set -eu

sha256() { sha256sum </run/secrets/"$1" | cut -d ' ' -f 1; }

for secret in toc_redis_password redis_admin_password; do
    [ -s /run/secrets/$secret ] || { echo "$secret is empty: fill in .env" >&2 && exit 1; }
done

accounts=$(
    sed -f /dev/stdin /etc/toc/redis-acl.conf <<EOF
s/TOC_SHA256/$(sha256 toc_redis_password)/
s/ADMIN_SHA256/$(sha256 redis_admin_password)/
/^user replica /d
EOF
)
# The image's own script leaves root behind.
exec docker-entrypoint.sh redis-server /etc/toc/redis.conf - <<EOF
$accounts
EOF
