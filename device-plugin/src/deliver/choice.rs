//! Which delivery a pool gets whose configuration leaves it to the daemon.
//!
//! CDI is better for exclusive pools: an answer to Allocate that names no device numbers stays true
//! when the kernel numbers them anew. But a kubelet or a runtime that passes CDI names over starts
//! containers without any device, and says nothing. So CDI is chosen only where both are known to
//! read it, and device nodes in all other cases.
//!
//! - The kubelet reports no version over its device plugin API. Its gRPC client reports its own:
//!   `grpc-go` 1.68 is newer than Kubernetes 1.28, the last release whose kubelet passes CDI names
//!   over, and in releases that have it (1.33 and newer) the field is read always (KEP-4009).
//! - The runtime's configuration says whether it reads CDI files
//!   ([`of_running_runtime`](diagnostics::container_runtime::of_running_runtime)).
//! - The directory for CDI files has to be the host's, not one of this container's own.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use diagnostics::container_runtime::Cdi;

use crate::config::Delivery;

/// The gRPC client that only kubelets have that always read CDI names.
const CLIENT: &str = "grpc-go/";
const CLIENT_VERSION: (u32, u32) = (1, 68);

/// What is known of those who have to understand CDI.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// What the kubelet's gRPC client calls itself; `None` before its first call.
    pub kubelet: Option<String>,
    /// What the runtime's configuration says.
    pub runtime: Cdi,
    /// Why the directory for CDI files is not the host's, if it is not.
    pub directory: Option<String>,
}

/// A delivery, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    /// It.
    pub delivery: Delivery,
    /// What it was chosen by, for a person.
    pub reason: String,
}

impl Default for Choice {
    fn default() -> Self {
        choose(&Facts::default())
    }
}

/// Chooses.
#[must_use]
pub(crate) fn choose(facts: &Facts) -> Choice {
    let obstacle = kubelet_obstacle(facts.kubelet.as_deref())
        .or_else(|| runtime_obstacle(&facts.runtime))
        .or_else(|| facts.directory.clone());
    match obstacle {
        Some(reason) => Choice {
            delivery: Delivery::DeviceSpecs,
            reason: format!("{reason}; delivery: cdi in the pool's configuration overrides this"),
        },
        None => Choice {
            delivery: Delivery::Cdi,
            reason: "kubelet and container runtime are known to read CDI names".to_owned(),
        },
    }
}

/// Why containers certainly do not get what CDI files say, if so: what is not known is none.
#[must_use]
pub(crate) fn known_obstacle(runtime: &Cdi) -> Option<String> {
    match runtime {
        Cdi::Off(_) | Cdi::Unable(_) => runtime_obstacle(runtime),
        Cdi::On(_) | Cdi::NoRuntime | Cdi::Silent(_) | Cdi::OutOfSight(_) | Cdi::CriO => None,
    }
}

/// What is not known of those who have to understand CDI.
#[must_use]
pub(crate) fn doubt(facts: &Facts) -> Option<String> {
    kubelet_obstacle(facts.kubelet.as_deref()).or_else(|| runtime_obstacle(&facts.runtime))
}

fn kubelet_obstacle(client: Option<&str>) -> Option<String> {
    let Some(client) = client else {
        return Some("the kubelet has not called yet".to_owned());
    };
    let known = client
        .split(' ')
        .find_map(|word| word.strip_prefix(CLIENT))
        .and_then(|version| {
            let mut numbers = version.split('.').map(str::parse::<u32>);
            Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
        });
    if known.is_some_and(|version| version >= CLIENT_VERSION) {
        return None;
    }
    Some(format!(
        "whether the kubelet reads CDI names is not known: its gRPC client is {client:?}, and only \
         {CLIENT}{}.{} and newer (Kubernetes 1.33) are sure to",
        CLIENT_VERSION.0, CLIENT_VERSION.1
    ))
}

fn runtime_obstacle(runtime: &Cdi) -> Option<String> {
    Some(match runtime {
        Cdi::On(_) => return None,
        Cdi::NoRuntime => "no container runtime is in sight".to_owned(),
        Cdi::Off(place) => format!("{place} has CDI switched off"),
        Cdi::Unable(place) => format!(
            "the container runtime {place} reads no CDI files, and says nothing: it is older than \
             containerd 1.7"
        ),
        Cdi::Silent(place) => format!(
            "whether the runtime reads CDI files is not known: {place} says neither enable_cdi nor \
             version = 3"
        ),
        Cdi::OutOfSight(place) => format!(
            "whether the runtime reads CDI files is not known: its configuration {place} is not in \
             sight"
        ),
        Cdi::CriO => {
            "whether the runtime reads CDI names is not known: CRI-O's configuration does \
                      not state its version"
                .to_owned()
        }
    })
}

/// Why files in this directory do not reach the host's runtime: it is not there, or, where the
/// host's files are below another root than this process's, it is on this container's own root.
#[must_use]
pub(crate) fn directory_obstacle(directory: &Path, is_on_host: bool) -> Option<String> {
    if is_on_host {
        return None;
    }
    let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev());
    let mount = "mount the host's CDI directory there, or name it with --cdi-dir";
    match (device(directory), device(Path::new("/"))) {
        (Ok(own), Ok(root)) if own != root => None,
        (Ok(_), _) => Some(format!(
            "{} is not known to be the host's; {mount}",
            directory.display()
        )),
        (Err(error), _) => Some(format!("{}: {error}; {mount}", directory.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Facts {
        Facts {
            kubelet: Some("grpc-go/1.72.2".into()),
            runtime: Cdi::On("/etc/containerd/config.toml".into()),
            directory: None,
        }
    }

    fn of(change: impl FnOnce(&mut Facts)) -> Choice {
        let mut facts = known();
        change(&mut facts);
        choose(&facts)
    }

    #[test]
    fn cdi_is_chosen_where_kubelet_and_runtime_are_known_to_read_it() {
        for client in [
            "grpc-go/1.68.0",
            "grpc-go/1.81.1-dev",
            "grpc-go/2.0.0",
            "x grpc-go/1.72.2",
        ] {
            let choice = of(|facts| facts.kubelet = Some(client.into()));
            assert_eq!(choice.delivery, Delivery::Cdi, "{client}");
        }
    }

    #[test]
    fn device_nodes_are_chosen_with_the_reason_where_anything_is_not_known() {
        let kubelet = |client: Option<&str>| {
            let client = client.map(str::to_owned);
            of(|facts| facts.kubelet = client)
        };
        let runtime = |runtime: Cdi| of(|facts| facts.runtime = runtime);
        for (choice, words) in [
            (Choice::default(), "has not called yet"),
            (kubelet(None), "has not called yet"),
            (kubelet(Some("grpc-go/1.65.0")), "grpc-go/1.65.0"),
            (kubelet(Some("grpc-go/1.9.99")), "grpc-go/1.9.99"),
            (kubelet(Some("grpc-go/1")), "not known"),
            (kubelet(Some("grpc-go/")), "not known"),
            (kubelet(Some("tonic/99.0.0")), "tonic/99.0.0"),
            (kubelet(Some("")), "not known"),
            (runtime(Cdi::NoRuntime), "no container runtime"),
            (runtime(Cdi::Off("/c".into())), "switched off"),
            (runtime(Cdi::Unable("/c".into())), "/c reads no CDI files"),
            (runtime(Cdi::Silent("/c".into())), "/c says neither"),
            (runtime(Cdi::OutOfSight("/c".into())), "/c is not in sight"),
            (runtime(Cdi::CriO), "CRI-O"),
            (
                of(|facts| facts.directory = Some("/d is not".into())),
                "/d is not",
            ),
        ] {
            assert_eq!(choice.delivery, Delivery::DeviceSpecs, "{choice:?}");
            assert!(choice.reason.contains(words), "{words}: {choice:?}");
        }
    }

    #[test]
    fn directory_on_this_containers_own_root_is_not_the_hosts() {
        let own = Path::new("/");
        assert!(directory_obstacle(own, false).is_some_and(|why| why.contains("--cdi-dir")));
        assert_eq!(directory_obstacle(own, true), None);
        assert_eq!(directory_obstacle(Path::new("/proc"), false), None);
        let missing = directory_obstacle(Path::new("/nonexistent"), false);
        assert!(missing.is_some_and(|why| why.contains("/nonexistent: No such file")));
    }
}
