//! The NICs that a request means: their number, their links and HCAs, and whether the pod may have them.

use std::collections::BTreeSet;

use cni_wire::CniResult;
use hca::{HcaId, MacAddress};

use super::{Add, Nic, name_is_free};
use crate::{
    allocation::{self, Allocated},
    authorize::{Asked, Rules, authorize},
    bind::Bound,
    config::{Allocation, Attach, Config, Devices},
    error::Error,
    parts::{self, Numbering},
    plan::{self, Plan},
    rdma::{self, Numbers, RdmaRequirement},
    recover::{self, Recovered},
    resolve::{self, NodeNetwork, Resolved, resolve},
};
use attachment::node::Node;

impl Add<'_> {
    /// What the pod holds, where it was asked, and with `devices: all` its units of the resource. The
    /// daemon says which, so a unit that stands in a network proves nothing. Of slots it has said
    /// already what they became.
    pub(super) fn units(&self) -> Result<(Option<Allocated>, Option<allocation::Devices>), Error> {
        let allocated = self.bound.map(Bound::allocated);
        let named = self.config.allocation.as_ref();
        let Some(named) = named.filter(|_| self.config.devices == Devices::All) else {
            return Ok((allocated, None));
        };
        let (socket, args) = (self.node.daemon_socket(), &self.request.env.args);
        let held = allocation::ask(&socket, args, &self.node.log)?;
        let devices = held.devices(&named.unit, &named.text, self.bound.map(Bound::hcas))?;
        Ok((
            Some(allocated.unwrap_or_else(|| held.allocated())),
            Some(devices),
        ))
    }

    /// A configuration for each NIC, in the order of the HCAs: every process that locks several NICs
    /// does so in this order.
    fn configs(&self, devices: Option<&allocation::Devices>) -> Vec<Config> {
        let hcas = match (self.bound, devices) {
            (Some(bound), _) => bound.hcas(),
            (None, Some(devices)) => devices.hcas.clone(),
            (None, None) => return vec![self.config.clone()],
        };
        let of = |hcas: Vec<HcaId>| Config {
            allocation: self.config.allocation.clone().map(|named| Allocation {
                text: match hcas.first().filter(|_| devices.is_some()) {
                    Some(hca) => hca.to_string(),
                    None => named.text,
                },
                slot: self
                    .bound
                    .and_then(|bound| bound.slot(hcas.first()?).cloned()),
                hcas,
                ..named
            }),
            ..self.config.clone()
        };
        match self.config.attach {
            Attach::RdmaOnly => vec![of(hcas.into_iter().collect())],
            _ => hcas.into_iter().map(|hca| of(vec![hca])).collect(),
        }
    }

    /// Recovers, resolves, authorizes and checks each NIC that the request means.
    pub(super) fn nics(
        &mut self,
        allocated: Option<&Allocated>,
        devices: Option<&allocation::Devices>,
        before: &CniResult,
    ) -> Result<Vec<Nic>, Error> {
        let configs = self.configs(devices);
        // All are back on the host before the first is judged.
        let mut recovered = Vec::new();
        for config in &configs {
            recovered.push(match config.attach {
                Attach::Move => {
                    recover::recover(self.node, &resolve::move_target(config)?, config.port)?
                }
                Attach::Child(_) | Attach::RdmaOnly => Recovered::default(),
            });
        }
        let mut network = NodeNetwork::default();
        let mut nics = Vec::new();
        for (config, recovered) in configs.into_iter().zip(recovered) {
            let mut resolved = self.resolve(&config, before, &mut network)?;
            let moves_rdma = moves_rdma(self.node, &config, &resolved)?;
            self.allow(&config, &resolved, moves_rdma, allocated)?;
            plan::check(&resolved, &config, &self.node.policy.values.allow)?;
            let mut snapshot = None;
            if let Resolved::Move(host) = &resolved {
                let taken = recover::snapshot(self.node, self.ipam, host, &recovered)?;
                let parts = nics.iter().map(|nic: &Nic| nic.plan.part()).collect();
                snapshot = Some(self.set_vf(taken, host, &config, parts)?);
            }
            // The driver made another netdev.
            if config.vf.guid.is_some() {
                network = NodeNetwork::default();
                resolved = self.resolve(&config, before, &mut network)?;
            }
            let mut plan = Plan::of(config, resolved, self.id.ifname.clone(), random_mac)?;
            if moves_rdma {
                let names = match &plan.resolved {
                    Resolved::RdmaOnly(target) => target.names(),
                    resolved => resolved.host_link().map_or(Ok(BTreeSet::new()), |host| {
                        rdma::of_netdev(&self.node.roots, &host.link, &host.rdma)
                    })?,
                };
                plan.rdma = rdma::describe(self.node, &names, self.numbers())?;
            }
            plan.snapshot = snapshot;
            nics.push(Nic {
                plan,
                _lock: recovered,
                leased: None,
                link: None,
            });
        }
        Ok(nics)
    }

    fn resolve(
        &mut self,
        config: &Config,
        before: &CniResult,
        network: &mut NodeNetwork,
    ) -> Result<Resolved, Error> {
        let (node, request) = (&mut *self.node, self.request);
        resolve(node, request, config, before, self.inside, network)
    }

    /// Asks the policy, and the kubelet where the request takes something from the host; `allocated` is
    /// its answer where it was asked already.
    fn allow(
        &self,
        config: &Config,
        resolved: &Resolved,
        moves_rdma: bool,
        allocated: Option<&Allocated>,
    ) -> Result<(), Error> {
        let node = &*self.node;
        let exclusive = node.exclusive_hcas()?;
        let rules = Rules {
            allow: &node.policy.values.allow,
            path: &node.policy.path,
            exclusive: &exclusive,
        };
        let asked = Asked { config, moves_rdma };
        authorize(resolved, asked, rules, || match allocated {
            Some(allocated) => Ok(allocated.clone()),
            None => {
                let args = &self.request.env.args;
                Ok(allocation::ask(&node.daemon_socket(), args, &node.log)?.allocated())
            }
        })
    }

    /// Says which rail each NIC is on, with `devices: all` also what its interface is called, by the
    /// order of the rails.
    pub(super) fn number(
        &mut self,
        nics: &mut [Nic],
        devices: Option<&allocation::Devices>,
    ) -> Result<(), Error> {
        if self.config.attach == Attach::RdmaOnly {
            return Ok(());
        }
        let ranges = self.ipam.rails(self.node, self.request)?;
        let policy = &self.node.policy;
        let numbering = Numbering {
            asked: self.config.rail,
            ranges: ranges.as_ref(),
            rails: &policy.values.rails,
            path: &policy.path,
        };
        let Some(devices) = devices else {
            for Nic { plan, .. } in nics {
                plan.rail = numbering.one(plan.resolved.host_link())?;
            }
            return Ok(());
        };
        let described = nics.iter().filter_map(|nic| parts::Nic::of(&nic.plan));
        let rails = numbering.all(&described.collect::<Vec<_>>(), devices)?;
        for (nic, rail) in nics.iter_mut().zip(rails) {
            nic.plan.rail = Some(rail);
        }
        nics.sort_by_key(|nic| nic.plan.rail);
        let hosts = nics.iter().filter_map(|Nic { plan, .. }| {
            Some((plan.rail?, plan.resolved.host_link()?.link.name.to_string()))
        });
        let names = parts::names(&self.config.names, self.id.ifname.as_str(), hosts)?;
        for (nic, name) in nics.iter_mut().zip(names) {
            name_is_free(self.inside, &name, self.pod)?;
            nic.plan.ifname = name;
        }
        Ok(())
    }

    /// Whether containers were promised the device nodes as they are.
    pub(super) fn numbers(&self) -> Numbers {
        match self.bound {
            Some(_) => Numbers::ReadAfterwards,
            None => Numbers::Promised,
        }
    }
}

/// Whether RDMA devices leave the host for the pod.
fn moves_rdma(node: &Node, config: &Config, resolved: &Resolved) -> Result<bool, Error> {
    let (mode, has_rdma, name) = match resolved {
        Resolved::RdmaOnly(target) => (target.mode, true, target.interface_name()),
        Resolved::Move(host) | Resolved::Child { parent: host, .. } => {
            let mode = match config.rdma {
                RdmaRequirement::Required => hca::netns_mode(&node.roots)?,
                RdmaRequirement::Auto | RdmaRequirement::Off => host.mode,
            };
            (mode, !host.rdma.is_empty(), host.link.name.to_string())
        }
    };
    rdma::moves(config.rdma, config.attach, mode, has_rdma, &name)
}

/// A random, locally administered address.
fn random_mac() -> Result<MacAddress, Error> {
    Ok(MacAddress::new(netlink::link::random_mac()))
}
