# make demo HOST=1: on a host with an HCA it shows what it says and leaves nothing; never on an uplink
# lab: nics=2 memory=768 binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

demo() { RDMA_BIN_DIR=/lab/bin bash /lab/demo-host; }

refuses "a host without an HCA is refused, by name" 'no RDMA device: /sys/class/infiniband' demo
make_hca eth0
ip addr add 192.168.10.1/24 dev eth0
ip route add default via 192.168.10.254 dev eth0
refuses "an uplink is left alone" 'rxe0: eth0 carries the default route' demo

make_hca eth1
ip link add link eth1 name eth1.5 type vlan id 5
refuses "so is a netdev with another on top" 'rxe1: eth1 has eth1.5 on top' demo
ip link delete eth1.5

before=$(host_state)
check "the demo passes on the other HCA" demo
contains "it showed the bandwidth" '^ *65536 +1000 +[0-9.]+ +[0-9.]+' "$checked"
contains "it proved that all is as before" 'as before; no lease is left' "$checked"
as_before "and so it is" "$before"
equal "no namespace is left" "" "$(ip netns list)"
