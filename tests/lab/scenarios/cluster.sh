# A whole real cluster of one node: installed with Helm, used, upgraded and cleaned
# lab: nics=4 memory=3072 cpus=2 timeout=2400 images=pods,node kubernetes=yes
# lab: cdi-containerd=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
shared=rdma/hca_shared_devices_a
manifests=/lab/manifests
address=172.20.0.1

# eth0 is the node's own, ens2f0 the HCA to share, the others are NICs for one pod.
node_address $address
ip link set eth1 name ens2f0
ip link set ens2f0 mtu 4200
make_hca ens2f0 mlx5_0
for nic in 0 1; do
	ip link set "eth$((nic + 2))" name "rdma$nic"
	make_hca "rdma$nic" "mlx5_$((nic + 1))"
	ip addr add "10.77.$nic.1/24" dev "rdma$nic"
	ip link set "rdma$nic" mtu 9000
	wait_for 20 settled "rdma$nic"
done
# As systemd leaves it, and Kubernetes expects it.
mount --make-rshared /
start_containerd /lab/containerd
ctr --namespace k8s.io image import /lab/node.tar
join_cluster $address
tell "$(kubectl get nodes -o wide --no-headers)"

in_daemon() { own exec ds/rdma-netdev -c rdma-device-plugin -- rdmactl "$@"; }
rolled() { own rollout status ds/rdma-netdev --timeout=300s; }

chart=$manifests/chart
# upgrade ARGUMENT…: the release, with other values.
upgrade() { helm upgrade rdma-netdev $chart --namespace kube-system "$@"; }
revision() { own get ds rdma-netdev -o json | jq .metadata.generation; }
own_pod() { own get pods -l app.kubernetes.io/name=rdma-netdev -o json | jq -r '.items[].metadata.uid'; }

step "helm install"
before=$(host_state)
check "the API server takes the manifests" kubectl apply --dry-run=server -k $manifests/base
equal "with no word of warning" "" "$(grep -i warning <<<"$checked" || true)"
check "and the chart" helm install rdma-netdev $chart --namespace kube-system
show cat <<<"$checked"
check "the DaemonSet is rolled out: its probes succeed" rolled
check "the node offers shares of its three PFs" wait_for 200 offers $shared 189

step "helm upgrade: the configuration of the RDMA shared device plugin"
own_pod >/tmp/pod
shares() { jq --argjson shares "$1" '.configList[0].rdmaHcaMax = $shares' $manifests/examples/perftest/pools.json; }
check "the API server takes it" upgrade --set-json "pools=$(shares 63)"
check "the node offers the HCA's shares" wait_for 200 offers $shared 63
equal "without a new pod" "$(</tmp/pod)" "$(own_pod)"
check "preflight in the container: nothing fails" in_daemon preflight --all
contains "it knows the ports" '^L01 +pass' "$checked"
show own get pods -o wide

step "kubectl apply -k manifests/examples/perftest"
check "the API server takes the example" kubectl apply -k $manifests/examples/perftest
check "both pods become ready" kubectl wait --for=condition=Ready --timeout=400s pod/rdma-test-pod-1 pod/rdma-test-pod-2
for pod in 1 2; do
	contains "pod $pod: net1 has an address of the range" '^192\.168\.111\.[0-9]+$' "$(address_of rdma-test-pod-$pod net1)"
	contains "pod $pod: Multus reports it" 'net1.*192\.168\.111\.' \
		"$(kubectl get pod rdma-test-pod-$pod -o json | jq -c '.metadata.annotations["k8s.v1.cni.cncf.io/network-status"] | fromjson')"
	equal "pod $pod has its HCA and no other" mlx5_0 "$(in_pod rdma-test-pod-$pod ibv_devinfo | awk '/^hca_id/ { print $2 }')"
done
check "status in the container: what is held, and what is leased" in_daemon status
contains "two units are held" "^$shared +shared( +[0-9]+){3} +63 +2$" "$checked"
contains "two addresses are leased" '^192\.168\.111\.0/24 +default +- +254 +2 ' "$checked"
show cat <<<"$checked"
check "pods in the container knows both" in_daemon pods
for pod in 1 2; do
	contains "pod $pod: container, unit, interface, address" \
		"^default/rdma-test-pod-$pod +perftest +$shared .* net1 +macvlan +$(address_of rdma-test-pod-$pod)" "$checked"
done
show cat <<<"$checked"
check "pods in the container, with namespaces" in_daemon pods -o wide
equal "of both pods the namespace is alive" 2 "$(grep -c 'default/rdma-test-pod-[12] .* (alive)' <<<"$checked")"
check "verify between the pods finds nothing wrong" \
	rdmactl verify --timeout 120 pod:rdma-test-pod-1 pod:rdma-test-pod-2
show cat <<<"$checked"

step "a network that the node's policy refuses"
kubectl apply -f - <<-'NAD'
	apiVersion: k8s.cni.cncf.io/v1
	kind: NetworkAttachmentDefinition
	metadata: {name: uplink}
	spec:
	  config: '{"cniVersion": "1.0.0", "name": "uplink", "type": "rdma-netdev", "attach": "macvlan", "master": "eth0"}'
NAD
kubectl run refused --image=localhost/rdma-tools:1 --restart=Never \
	--annotations=k8s.v1.cni.cncf.io/networks=uplink -- sleep infinity
said() { kubectl get events --field-selector involvedObject.name=refused,reason=FailedCreatePodSandBox -o json | jq -re '.items[0].message'; }
check "the pod's events say so" wait_for 200 said
contains "with the object, the reason and the remedy" \
	'container to network "uplink": .* on netdev eth0 is denied: .*; name another netdev; if pods may have eth0, set allow\.uplinks' "$(said)"
show said
kubectl delete pod refused --now --wait=false

step "values that change"
check "fewer shares" upgrade --set-json "pools=$(shares 50)"
check "the node offers fewer, without a restart" wait_for 200 offers $shared 50
refuses "a key that the chart does not have" cniplugins upgrade --reuse-values --set cniplugins.install=false
own get configmap rdma-netdev -o json >/tmp/configmap
check "a configuration that is not JSON" kubectl apply -f <(jq '.data["pools.json"] = "{\"configList\": [{"' /tmp/configmap)
reported() { in_daemon status | grep -Ei 'config.*(rejected|expected|EOF)'; }
check "is reported" wait_for 200 reported
show reported
equal "and changes nothing" 50 "$(allocatable $shared)"
check "the first one again" upgrade --set-json "pools=$(shares 63)"
check "is in force" wait_for 200 offers $shared 63
equal "all that without a new pod" "$(</tmp/pod)" "$(own_pod)"
generation=$(revision)
check "another policy" upgrade --reuse-values --set policy.ipam.cooldown=2s
check "rolls the DaemonSet" test "$(revision)" != "$generation"
check "to its end" rolled
contains "and is on the node" '"cooldown": "2s"' "$(</etc/rdma-netdev/policy.json)"
check "the node offers the shares" wait_for 200 offers $shared 63

step "a second release, for other nodes"
check "it is installed" helm install rdma-storage $chart --namespace kube-system --set crds.install=false --set nodeSelector.pool=storage
equal "on no node" 0 "$(own get ds rdma-storage -o json | jq .status.desiredNumberScheduled)"
check "and goes" helm uninstall rdma-storage --namespace kube-system
check "the definition stays" kubectl get crd addresssubnets.rdma-netdev.io
check "and the pod of the first" rolled

step "the kubelet restarts, the DaemonSet is rolled"
restart_kubelet $address
registered() { own logs ds/rdma-netdev -c rdma-device-plugin | grep -c 'registered' | grep -qv '^[01]$'; }
check "the daemon registers again" wait_for 200 registered
check "the node offers the slots" wait_for 200 offers $shared 63
own rollout restart ds/rdma-netdev
check "the DaemonSet is rolled" rolled
check "the node offers the slots again" wait_for 200 offers $shared 63
check "the pods talk as before" in_pod rdma-test-pod-1 ping -c 2 -W 5 "$(address_of rdma-test-pod-2)"
check "the pods end" kubectl delete -k $manifests/examples/perftest --timeout=200s

step "helm upgrade -f values/exclusive.yaml -f values/driver-container.yaml, and rails"
check "the API server takes the values" upgrade -f $chart/values/exclusive.yaml -f $chart/values/driver-container.yaml
check "the DaemonSet is rolled out" rolled
equal "the NICs wait for the driver container" 0 "$(allocatable rdma/nic)"
touch /run/mellanox/drivers/.driver-ready
check "the node offers the NICs" wait_for 200 offers rdma/nic 2
check "and no slots" wait_for 200 offers $shared 0
kubectl apply -f $manifests/examples/rails/nad.yaml
sed -E -e '/nvidia\.com/d' -e 's|(rdma/nic): 8|\1: 2|' -e 's|(networks: rdma-rail, rdma-rail).*|\1|' \
	-e 's|replicas: 2|replicas: 1|' $manifests/examples/rails/workers.yaml >/tmp/workers.yaml
check "the API server takes the StatefulSet" kubectl apply -f /tmp/workers.yaml
check "its worker becomes ready" kubectl rollout status statefulset/rails --timeout=400s
for net in net1 net2; do
	contains "$net has an address of the range" '^10\.64\.' "$(address_of rails-0 $net)"
done
equal "the two NICs are two HCAs" 2 "$(in_pod rails-0 ibv_devinfo | grep -c hca_id)"
equal "no rail has the pod's default route" "" "$(in_pod rails-0 ip route show default | grep 'dev net' || true)"
check "it ends" kubectl delete -f /tmp/workers.yaml --timeout=200s
gone() { ! kubectl get pod rails-0; }
check "its pod is gone" wait_for 200 gone

step "delivery by CDI"
cat >/tmp/cdi.yaml <<-'VALUES'
	pools:
	  version: 1
	  pools: [{resource: rdma/hca, mode: shared, shares: 64, delivery: cdi, select: {functions: [pf]}}]
VALUES
check "the API server takes the values" upgrade -f /tmp/cdi.yaml -f $chart/values/local-store.yaml
check "the DaemonSet is rolled out" rolled
check "the node offers shares of its three HCAs" wait_for 200 offers rdma/hca 192
kubectl apply -f - <<-'POD'
	apiVersion: v1
	kind: Pod
	metadata: {name: by-cdi}
	spec:
	  terminationGracePeriodSeconds: 1
	  containers:
	  - name: work
	    image: localhost/rdma-tools:1
	    imagePullPolicy: IfNotPresent
	    command: [sleep, infinity]
	    resources: {limits: {rdma/hca: 1}}
POD
check "a pod becomes ready" kubectl wait --for=condition=Ready --timeout=400s pod/by-cdi
contains "containerd gave it the device nodes of one HCA" '^rdma_cm uverbs[0-9]$' \
	"$(in_pod by-cdi sh -c 'cd /dev/infiniband && echo *')"
check "it ends" kubectl delete pod by-cdi --timeout=200s

step "helm upgrade --set uninstall.enabled=true, helm uninstall"
check "the API server takes it" upgrade --reuse-values --set uninstall.enabled=true
check "the node becomes clean" rolled
show own logs ds/rdma-netdev -c uninstall
equal "nothing is left on the node" "" "$(find /opt/cni/bin -name 'rdma*'
	find /etc/rdma-netdev /var/lib/rdma-netdev /run/rdma-netdev /var/run/cdi -mindepth 1 || true)"
check "the release goes" helm uninstall rdma-netdev --namespace kube-system --wait
as_before "the host is as before" "$before"
