//! What a network configuration may ask for: its `ipam` object with whereabouts' flat file, within the
//! bounds that the node's policy sets for its store.

use super::Plugin;
use crate::config::Config;
use cni_wire::json::{self, Value};
use cni_wire::{Code, Error, KNOWN_ARGS, Request, Section};
use ipnetwork::IpNetwork;
use node::policy::{StoreKind, StorePolicy};

/// Where whereabouts keeps its flat file, first hit wins. The NetworkAttachmentDefinition's
/// `configuration_path` is not among them: it may be written by a namespace's user.
const FLAT_FILES: [&str; 2] = [
    "etc/kubernetes/cni/net.d/whereabouts.d/whereabouts.conf",
    "etc/cni/net.d/whereabouts.d/whereabouts.conf",
];

impl Plugin {
    /// Reads the `ipam` object of a request as ADD does.
    ///
    /// # Errors
    /// The policy's fault, [`Config::read`]'s, or code 4 for an unknown key of `CNI_ARGS`.
    pub fn config(&self, request: &Request) -> Result<Config, Error> {
        self.trusted_policy()?;
        request.env.args.allow_only(&KNOWN_ARGS)?;
        let flat = self.flat_file(request)?;
        let section = flat
            .as_ref()
            .map_or_else(|| Section::absent("flat file"), Section::root);
        let config = Config::read(&request.config, &section, &self.policy)?;
        self.leases_all(&config)?;
        self.within_bounds(&config)?;
        Ok(config)
    }

    /// Refuses addresses that nobody leases, where the policy does not let networks choose them.
    fn leases_all(&self, config: &Config) -> Result<(), Error> {
        match config.fixed.first() {
            Some(fixed) if !self.policy.allow.unleased_addresses() => {
                let fixed = fixed.address;
                let message =
                    format!("the node's policy does not allow ipam.addresses, such as {fixed}");
                Err(Error::new(Code::Policy, message)
                    .with_details("use range, or let an administrator add static to allow.ipam"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses ranges and network names that the policy's store is not for.
    fn within_bounds(&self, config: &Config) -> Result<(), Error> {
        let Some(StorePolicy { bounds, kind, .. }) = self.policy.stores.get(&config.store) else {
            return Ok(());
        };
        let mut ranges = config.all_ranges();
        if *kind == StoreKind::Node
            && let Some(range) = ranges.find(|range| range.per_node().is_some())
        {
            let (range, store) = (range.subnet(), &config.store);
            let message = format!(
                "perNode of range {range} needs a store of several nodes, and store {store:?} is this node's alone"
            );
            return Err(Error::new(Code::InvalidConfig, message)
                .with_details("leave perNode out, or name another store in ipam.store"));
        }
        let refuse = |what: String| {
            let store = &config.store;
            let message = format!("the node's policy does not allow {what} in store {store:?}");
            Err(Error::new(Code::Policy, message).with_details(format!(
                "use another, or let an administrator add it to stores.{store}"
            )))
        };
        let name = config.network_name.as_deref().unwrap_or_default();
        if let Some(names) = &bounds.network_names
            && !names.iter().any(|known| known == name)
        {
            return refuse(format!("network_name {name:?}"));
        }
        // Such a range is compared with no other one of its space.
        if bounds.network_names.is_some() && !config.overlapping {
            return refuse("enable_overlapping_ranges: false".to_owned());
        }
        let Some(allowed) = &bounds.ranges else {
            return Ok(());
        };
        let is_inside = |network: IpNetwork| {
            allowed.iter().any(|allowed| {
                allowed.prefix() <= network.prefix() && allowed.contains(network.network())
            })
        };
        for range in config.all_ranges() {
            let subnet = range.subnet();
            if !is_inside(subnet) {
                return refuse(format!("range {subnet}"));
            }
        }
        let mut fixed = config.fixed.iter().map(|fixed| fixed.address.ip());
        match fixed.find(|address| !is_inside((*address).into())) {
            Some(address) => refuse(format!("address {address}")),
            None => Ok(()),
        }
    }

    /// whereabouts' flat file, when it was called by that name.
    fn flat_file(&self, request: &Request) -> Result<Option<Value>, Error> {
        if request.config.ipam_type()? != Some("whereabouts") {
            return Ok(None);
        }
        let paths = match &self.policy.ipam.flat_file {
            Some(path) => vec![path.clone()],
            None => FLAT_FILES.iter().map(|path| self.root.join(path)).collect(),
        };
        for path in paths {
            let failed = |why: &dyn std::fmt::Display| {
                Error::new(
                    Code::InvalidConfig,
                    format!("flat file {}: {why}", path.display()),
                )
            };
            match std::fs::read(&path) {
                Ok(text) => {
                    return match json::parse(&text) {
                        Ok(object @ Value::Object(_)) => Ok(Some(object)),
                        Ok(_) => Err(failed(&"is not a JSON object")),
                        Err(error) => Err(failed(&error)),
                    };
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        Ok(None)
    }
}
