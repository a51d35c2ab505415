//! The cases, one module per area and subject: `cni_*`, `ipam_*`, `dp_*`, `standin_*`.
//!
//! A module has a `pub(crate) const CASES: &[Case]`, made with
//! `case!(function, Need, …)`; a case is a `fn() -> anyhow::Result<()>`.

mod chain_pods;
mod cni_admin;
mod cni_child;
mod cni_delegate;
mod cni_faults;
mod cni_gc;
mod cni_ipam;
mod cni_journal;
mod cni_log;
mod cni_move;
mod cni_policy;
mod cni_protocol;
mod cni_rails;
mod cni_rdma;
mod cni_restore;
mod docs;
mod dp_admin;
mod dp_delivery;
mod dp_hostile;
mod dp_install;
mod dp_kubelet;
mod dp_node_socket;
mod dp_running;
mod dp_topology;
mod dp_validate;
mod dp_verify;
mod hostile_addresses;
mod hostile_allocation;
mod hostile_bytes;
mod hostile_calls;
mod hostile_config;
mod hostile_del;
mod hostile_files;
mod hostile_hosts;
mod hostile_identity;
mod hostile_ipam;
mod hostile_journal;
mod hostile_links;
mod hostile_logs;
mod hostile_names;
mod hostile_pods;
mod hostile_races;
mod hostile_random;
mod hostile_stacked;
mod hostile_uplinks;
mod ipam_calls;
mod ipam_crowd;
mod ipam_faults;
mod ipam_kill;
mod ipam_power;
mod standin_kubelet;
mod standin_multus;
mod standin_netns;

use e2e::harness::Case;

/// Every case there is.
pub(crate) fn all() -> impl Iterator<Item = Case> {
    [
        chain_pods::CASES,
        cni_admin::CASES,
        cni_child::CASES,
        cni_delegate::CASES,
        cni_faults::CASES,
        cni_gc::CASES,
        cni_ipam::CASES,
        cni_journal::CASES,
        cni_log::CASES,
        cni_move::CASES,
        cni_policy::CASES,
        cni_protocol::CASES,
        cni_rails::CASES,
        cni_rdma::CASES,
        cni_restore::CASES,
        docs::CASES,
        dp_admin::CASES,
        dp_delivery::CASES,
        dp_hostile::CASES,
        dp_install::CASES,
        dp_kubelet::CASES,
        dp_node_socket::CASES,
        dp_running::CASES,
        dp_topology::CASES,
        dp_validate::CASES,
        dp_verify::CASES,
        hostile_addresses::CASES,
        hostile_allocation::CASES,
        hostile_bytes::CASES,
        hostile_calls::CASES,
        hostile_config::CASES,
        hostile_del::CASES,
        hostile_files::CASES,
        hostile_hosts::CASES,
        hostile_identity::CASES,
        hostile_ipam::CASES,
        hostile_journal::CASES,
        hostile_links::CASES,
        hostile_logs::CASES,
        hostile_names::CASES,
        hostile_pods::CASES,
        hostile_races::CASES,
        hostile_random::CASES,
        hostile_stacked::CASES,
        hostile_uplinks::CASES,
        ipam_calls::CASES,
        ipam_crowd::CASES,
        ipam_faults::CASES,
        ipam_kill::CASES,
        ipam_power::CASES,
        standin_kubelet::CASES,
        standin_multus::CASES,
        standin_netns::CASES,
    ]
    .into_iter()
    .flatten()
    .copied()
}
