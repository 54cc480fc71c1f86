#!/bin/bash
# Run a command on two hosts with a network between them, whose names nobody knows: 10.77.0.1 and 10.77.0.2.
# To be run in network, UTS and mount namespaces of its own.
set -e
printf '127.0.0.1 localhost\n' >"$1/hosts"
: >"$1/resolv.conf"
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
shift
hostname first.nowhere.invalid
unshare --net --uts sh -c 'hostname second.nowhere.invalid; exec sleep 1000' &
second=$!
until [ "$(readlink /proc/$second/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do read -rt 0.01 <> <(:) || :; done
ip link set lo up
ip link add first type veth peer name second netns $second
ip address add 10.77.0.1/24 dev first
ip link set first up
on_second="nsenter --target $second --net --uts"
$on_second ip link set lo up
$on_second ip address add 10.77.0.2/24 dev second
$on_second ip link set second up
NODE_NAME=second $on_second "$@" &
other=$!
NODE_NAME=first "$@" && wait $other
kill $second
