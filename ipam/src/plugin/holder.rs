//! Whose the addresses are that a request is about.

use super::Plugin;
use crate::lease::{Holder, Pod};
use cni_wire::{Code, Error, Request};
use std::os::unix::fs::MetadataExt;

impl Plugin {
    pub(super) fn holder(&self, request: &Request) -> Result<Holder, Error> {
        let id = request.attachment()?;
        if id.container_id.as_str().len() > super::MAX_CONTAINER_BYTES {
            let rule = "CNI_CONTAINERID is longer than 200 bytes";
            return Err(Error::new(Code::InvalidEnvironment, rule));
        }
        let netns = request.env.netns.clone();
        Ok(Holder {
            pod: pod(request)?,
            container: id.container_id.as_str().to_owned(),
            interface: id.ifname.as_str().to_owned(),
            netns_inode: netns
                .as_ref()
                .and_then(|path| std::fs::metadata(path).ok())
                .map(|m| m.ino()),
            netns,
            device: device(request)?,
            ..self.anybody(request)
        })
    }

    pub(super) fn anybody(&self, request: &Request) -> Holder {
        Holder {
            network: request.config.name.clone(),
            pod: None,
            container: "status".to_owned(),
            interface: "status".to_owned(),
            node: self.node.clone(),
            netns: None,
            netns_inode: None,
            device: None,
        }
    }
}

/// The pod by `CNI_ARGS`, as Kubernetes runtimes and Multus pass it.
fn pod(request: &Request) -> Result<Option<Pod>, Error> {
    let get = |key: &str| match request.env.args.get(key) {
        Some(value) if value.len() > 253 => Err(Error::new(
            Code::InvalidEnvironment,
            format!("CNI_ARGS {key} is longer than 253 bytes"),
        )),
        value => Ok(value.map(str::to_owned)),
    };
    let Some(name) = get("K8S_POD_NAME")? else {
        return Ok(None);
    };
    let namespace = get("K8S_POD_NAMESPACE")?.unwrap_or_default();
    Ok(Some(Pod {
        namespace,
        name,
        uid: get("K8S_POD_UID")?,
    }))
}

/// The device of the attachment, by any of the keys that Multus fills.
fn device(request: &Request) -> Result<Option<String>, Error> {
    let runtime = request.config.runtime_config()?;
    let root = request.config.root();
    for (section, key) in [
        (&runtime, "deviceID"),
        (&root, "deviceID"),
        (&root, "pciBusID"),
    ] {
        // A key of the main plugin; a wrong one is its to refuse.
        if let Ok(Some(device)) = section.text(key)
            && device.len() <= 256
        {
            return Ok(Some(device.to_owned()));
        }
    }
    Ok(None)
}
