#!/bin/sh
# Runs a command on a host of the lab: mpirun calls it in place of ssh.
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host && $*"
