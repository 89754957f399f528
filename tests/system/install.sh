#!/bin/sh
# What the system tests need of Debian or Ubuntu. Asks for nothing that is already there; starts no service.
set -eu

missing=
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge chromium:chromium \
    chromedriver:chromium-driver; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
done
[ -z "$missing" ] && exit 0

root=
[ "$(id -u)" -eq 0 ] || root=sudo
$root apt-get update -q
# RUNLEVEL=1 keeps the packages from starting daemons of their own: the tests run theirs.
# shellcheck disable=SC2086
$root env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
