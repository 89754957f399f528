#!/bin/sh
# What the system tests need of Debian or Ubuntu. Asks for nothing that is already there; starts no service.
set -eu

missing=
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge chromium:chromium \
    chromedriver:chromium-driver bwrap:bubblewrap; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
done
[ -z "$missing" ] && exit 0

fail() {
    echo "the system tests need Debian's packages$missing, and $1" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "there is no apt-get here: install them as your system does"
root=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "installing them takes root: run tests/system/install.sh as root once"
    root=sudo
fi
echo "installing$missing (once; a minute or two)"
# shellcheck disable=SC2086
{
    $root apt-get update -qq &&
        # RUNLEVEL=1 keeps the packages from starting daemons of their own: the tests run theirs.
        $root env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing
} >/dev/null || fail "apt-get could not install them: see its error above, or ask whether this host reaches a mirror"
