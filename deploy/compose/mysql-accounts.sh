#!/bin/sh
# Sourced by the image's script when the data directory is new; docker_process_sql is its way to run SQL as root.
docker_process_sql <<EOF
CREATE USER 'toc'@'%' IDENTIFIED BY '$(cat /run/secrets/toc_mysql_password)';
CREATE USER 'toc_migrate'@'%' IDENTIFIED BY '$(cat /run/secrets/toc_migrate_password)';
EOF
