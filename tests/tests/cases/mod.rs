//! The cases, one module per area and subject: `cni_*`, `ipam_*`, `dp_*`, `standin_*`.
//!
//! A module has a `pub(crate) const CASES: &[Case]`, made with
//! `case!(function, Need, …)`; a case is a `fn() -> anyhow::Result<()>`.

use e2e::harness::Case;

/// The modules, and every case in them.
macro_rules! modules {
    ($($module:ident,)+) => {
        $(mod $module;)+

        /// Every case there is, one of each module in turn: some modules wait most of their time, and
        /// others compute.
        pub(crate) fn all() -> impl Iterator<Item = Case> {
            let modules = [$($module::CASES),+];
            let most = modules.iter().map(|cases| cases.len()).max().unwrap_or(0);
            (0..most).flat_map(move |turn| {
                let each = modules.into_iter();
                each.filter_map(move |cases| cases.get(turn)).copied()
            })
        }
    };
}

modules! {
    agent_faults,
    agent_rdmanode,
    agent_subnets,
    chain_pods,
    chain_shown,
    cni_admin,
    cni_all_nics,
    cni_child,
    cni_child_addresses,
    cni_delegate,
    cni_detach,
    cni_faults,
    cni_follow,
    cni_gc,
    cni_late,
    cni_late_faults,
    cni_late_machine,
    cni_late_rails,
    cni_log,
    cni_machines,
    cni_move,
    cni_policy,
    cni_protocol,
    cni_rdma,
    cni_restore,
    cni_return,
    cni_source_routing,
    docs,
    dp_admin,
    dp_budget,
    dp_configuration,
    dp_delivery,
    dp_holdings,
    dp_hostile,
    dp_install,
    dp_kubectl,
    dp_kubelet,
    dp_late,
    dp_node_socket,
    dp_node_socket_clients,
    dp_node_socket_restarts,
    dp_plan,
    dp_reclaim,
    dp_report,
    dp_running,
    dp_topology,
    dp_validate,
    dp_verify,
    dp_verify_all,
    hostile_addresses,
    hostile_allocation,
    hostile_bytes,
    hostile_calls,
    hostile_config,
    hostile_del,
    hostile_files,
    hostile_hosts,
    hostile_identity,
    hostile_ipam,
    hostile_journal,
    hostile_keys,
    hostile_leases,
    hostile_links,
    hostile_logs,
    hostile_names,
    hostile_netlink,
    hostile_pods,
    hostile_races,
    hostile_random,
    hostile_stacked,
    hostile_trust,
    hostile_uplinks,
    ipam_calls,
    ipam_crowd,
    ipam_faults,
    ipam_kill,
    standin_kubelet,
    standin_multus,
    standin_netns,
}
