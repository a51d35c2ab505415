//! The kubelet's stand-in is as strict as a kubelet: each case is one thing
//! that a real one does and that a device plugin trips over.

use std::collections::BTreeSet;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use e2e::case;
use e2e::harness::Case;
use e2e::kubelet::{CHECKPOINT_FILE, Container, Kubelet, Misbehaviour, NotAdmitted, Pod, Settings};
use kubelet_api::deviceplugin::{Device, DevicePluginOptions, NumaNode, TopologyInfo};
use kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use kubelet_api::podresources::{
    AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest,
};
use tempfile::TempDir;
use tonic::Code;

use crate::plugin::{Client, Plugin, Script, healthy, register, request};

pub(crate) const CASES: &[Case] = &[
    case!(refuses_what_is_no_extended_resource),
    case!(refuses_a_version_it_does_not_speak),
    case!(refuses_a_plugin_that_does_not_serve_yet),
    case!(asks_the_plugin_for_its_options_and_ignores_those_of_the_request),
    case!(speaks_to_the_authority_localhost),
    case!(a_registration_does_not_wait_for_devices),
    case!(a_start_deletes_sockets_and_nothing_else),
    case!(a_stream_that_ends_takes_all_devices_at_once),
    case!(the_end_of_an_older_plugin_hits_the_newer),
    case!(a_list_beyond_the_receive_limit_ends_the_stream),
    case!(each_container_has_one_allocate_of_one_request),
    case!(a_restarted_container_gets_the_old_answer),
    case!(preference_is_asked_only_if_advertised),
    case!(init_containers_devices_are_used_again),
    case!(a_refused_allocate_leaves_nothing),
    case!(a_pod_that_does_not_fit_stays_pending),
    case!(after_a_reboot_a_pod_fails_until_its_plugin_is_back),
    case!(pre_start_is_called_each_time_if_asked_for),
    case!(pod_resources_has_an_entry_for_each_device),
    case!(misbehaves_on_request),
];

const HCA: &str = "rdma/hca";
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

struct World {
    kubelet: Kubelet,
    root: TempDir,
}

impl World {
    fn new() -> Result<Self> {
        let root = tempfile::tempdir()?;
        Ok(Self {
            kubelet: Kubelet::start(Settings::below(root.path()))?,
            root,
        })
    }

    fn plugins(&self) -> &Path {
        &self.kubelet.settings().device_plugins
    }

    fn plugin(&self, script: Script) -> Result<Plugin> {
        Plugin::serve(self.plugins(), "hca.sock", script)
    }

    /// A registered plugin with healthy devices.
    fn with_devices(script: Script, ids: &[&str]) -> Result<(Self, Plugin)> {
        let world = Self::new()?;
        let plugin = world.plugin(script)?;
        plugin.list_healthy(ids);
        plugin.register(HCA)?;
        world
            .kubelet
            .wait_allocatable(HCA, ids.len(), WAIT_TIMEOUT)?;
        Ok((world, plugin))
    }

    fn restart(self) -> Result<Self> {
        Ok(Self {
            kubelet: self.kubelet.restart()?,
            root: self.root,
        })
    }
}

fn refuses_what_is_no_extended_resource() -> Result<()> {
    let world = World::new()?;
    let plugin = world.plugin(Script::default())?;
    for name in [
        "hca",
        "RDMA/hca",
        "kubernetes.io/hca",
        "rdma/",
        "rdma/a b",
        "requests.rdma/hca",
    ] {
        let refused = plugin.register(name).unwrap_err();
        assert_eq!(refused.code(), Code::Unknown);
        assert!(refused.message().contains(name), "{}", refused.message());
    }
    assert_eq!(
        plugin.script.lock().unwrap().options_asked,
        0,
        "no dial back for a bad name"
    );
    assert!(world.kubelet.node().is_empty());
    Ok(())
}

fn refuses_a_version_it_does_not_speak() -> Result<()> {
    let world = World::new()?;
    let _plugin = world.plugin(Script::default())?;
    for version in ["", "v1", "v1alpha", "V1beta1"] {
        let mut request = request(HCA, "hca.sock");
        request.version = version.to_owned();
        let refused = register(world.plugins(), &request).unwrap_err();
        assert!(
            refused.message().contains("v1beta1"),
            "{}",
            refused.message()
        );
    }
    Ok(())
}

/// A socket that is bound but not served is the usual mistake: the kubelet
/// dials back inside Register.
fn refuses_a_plugin_that_does_not_serve_yet() -> Result<()> {
    let world = World::new()?;
    let _bound = UnixListener::bind(world.plugins().join("hca.sock"))?;
    let before = Instant::now();
    let refused = register(world.plugins(), &request(HCA, "hca.sock")).unwrap_err();
    assert!(
        before.elapsed() >= Duration::from_secs(9),
        "the kubelet waits for 10 s"
    );
    assert!(
        refused.message().contains("failed to dial"),
        "{}",
        refused.message()
    );
    assert!(world.kubelet.node().is_empty());
    Ok(())
}

fn asks_the_plugin_for_its_options_and_ignores_those_of_the_request() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a", "b"])?;
    let mut with_options = request(HCA, "hca.sock");
    let all = DevicePluginOptions {
        pre_start_required: true,
        get_preferred_allocation_available: true,
    };
    with_options.options = Some(all);
    register(world.plugins(), &with_options)?;
    world.kubelet.wait_allocatable(HCA, 2, WAIT_TIMEOUT)?;

    world.kubelet.admit(Pod::with_limits("one", &[(HCA, 1)])?)?;
    world.kubelet.run_options("default/one", "main")?;
    let script = plugin.script.lock().unwrap();
    assert_eq!(script.options_asked, 2);
    assert!(script.asked_preference.is_empty());
    assert!(script.pre_started.is_empty());
    Ok(())
}

fn speaks_to_the_authority_localhost() -> Result<()> {
    let (_world, plugin) = World::with_devices(Script::default(), &["a"])?;
    let authorities: BTreeSet<_> = plugin
        .script
        .lock()
        .unwrap()
        .authorities
        .drain(..)
        .collect();
    assert_eq!(authorities, ["localhost".to_owned()].into());
    Ok(())
}

fn a_registration_does_not_wait_for_devices() -> Result<()> {
    let world = World::new()?;
    let plugin = world.plugin(Script::default())?;
    plugin.register(HCA)?;
    assert!(
        world.kubelet.node().is_empty(),
        "no list yet, so the node does not know the resource"
    );
    let refused = world.kubelet.admit(Pod::with_limits("early", &[(HCA, 1)])?);
    assert!(
        matches!(refused, Err(NotAdmitted::Unschedulable { .. })),
        "{refused:?}"
    );
    plugin.list_healthy(&["a"]);
    world.kubelet.wait_allocatable(HCA, 1, WAIT_TIMEOUT)
}

fn a_start_deletes_sockets_and_nothing_else() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a"])?;
    let plugins = world.plugins().to_path_buf();
    std::fs::write(plugins.join("notes"), "kept")?;
    std::fs::create_dir(plugins.join("directory"))?;
    let _nested = UnixListener::bind(plugins.join("directory/inner.sock"))?;

    let world = world.restart()?;
    assert!(
        !plugins.join("hca.sock").exists(),
        "a plugin notices by its vanished socket"
    );
    assert!(plugins.join("kubelet.sock").exists());
    assert!(plugins.join(CHECKPOINT_FILE).exists());
    assert!(plugins.join("notes").exists());
    assert!(plugins.join("directory/inner.sock").exists());
    let quantity = world.kubelet.node()[HCA];
    assert_eq!(
        (quantity.capacity, quantity.allocatable),
        (0, 0),
        "known, but nothing of it"
    );

    drop(plugin);
    let again = world.plugin(Script::default())?;
    again.list_healthy(&["a", "b"]);
    again.register(HCA)?;
    world.kubelet.wait_allocatable(HCA, 2, WAIT_TIMEOUT)
}

fn a_stream_that_ends_takes_all_devices_at_once() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a", "b"])?;
    plugin.end_streams();
    world.kubelet.wait_allocatable(HCA, 0, WAIT_TIMEOUT)?;
    assert_eq!(world.kubelet.node()[HCA].capacity, 2, "for the grace");

    drop(plugin);
    std::fs::remove_file(world.plugins().join("hca.sock"))?;
    let again = world.plugin(Script::default())?;
    again.list_healthy(&["a"]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        world.kubelet.node()[HCA].allocatable,
        0,
        "the kubelet never redials"
    );
    again.register(HCA)?;
    world.kubelet.wait_allocatable(HCA, 1, WAIT_TIMEOUT)
}

/// Connections are keyed by resource name: a rolling upgrade is not seamless.
fn the_end_of_an_older_plugin_hits_the_newer() -> Result<()> {
    let (world, older) = World::with_devices(Script::default(), &["a"])?;
    let newer = Plugin::serve(world.plugins(), "newer.sock", Script::default())?;
    newer.list_healthy(&["a", "b"]);
    newer.register(HCA)?;
    world.kubelet.wait_allocatable(HCA, 2, WAIT_TIMEOUT)?;

    drop(older);
    world.kubelet.wait_allocatable(HCA, 0, WAIT_TIMEOUT)?;
    newer.list_healthy(&["a", "b", "c"]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        world.kubelet.node()[HCA].allocatable,
        0,
        "its stream is closed too"
    );
    newer.register(HCA)?;
    world.kubelet.wait_allocatable(HCA, 3, WAIT_TIMEOUT)
}

fn a_list_beyond_the_receive_limit_ends_the_stream() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a"])?;
    let many = |count: usize| (0..count).map(|n| healthy(&format!("{n:0>63}"))).collect();
    plugin.list(many(40_000));
    world.kubelet.wait_allocatable(HCA, 40_000, WAIT_TIMEOUT)?;
    plugin.list(many(60_000));
    world.kubelet.wait_allocatable(HCA, 0, WAIT_TIMEOUT)
}

fn each_container_has_one_allocate_of_one_request() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a", "b", "c", "d"])?;
    let containers = vec![
        Container::with_limits("one", &[(HCA, 1)]),
        Container::with_limits("two", &[(HCA, 2)]),
        Container::with_limits("none", &[]),
    ];
    world
        .kubelet
        .admit(Pod::of_containers("pod", Vec::new(), containers)?)?;
    let sizes: Vec<Vec<usize>> = {
        let script = plugin.script.lock().unwrap();
        let requests = script.allocated.iter().map(|call| &call.container_requests);
        requests
            .map(|all| all.iter().map(|one| one.devices_ids.len()).collect())
            .collect()
    };
    assert_eq!(sizes, [[1], [2]]);

    let assigned = world.kubelet.assigned("default/pod")?;
    let all: BTreeSet<_> = assigned.values().flatten().collect();
    assert_eq!(all.len(), 3, "no device twice");
    let options = world.kubelet.run_options("default/pod", "two")?;
    let paths: BTreeSet<_> = options
        .devices
        .iter()
        .map(|d| d.container_path.clone())
        .collect();
    let key = ("two".to_owned(), HCA.to_owned());
    assert_eq!(
        paths,
        assigned[&key]
            .iter()
            .map(|id| format!("/dev/{id}"))
            .collect()
    );
    Ok(())
}

fn a_restarted_container_gets_the_old_answer() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a", "b"])?;
    world.kubelet.admit(Pod::with_limits("pod", &[(HCA, 1)])?)?;
    let first = world.kubelet.run_options("default/pod", "main")?;
    assert_eq!(world.kubelet.run_options("default/pod", "main")?, first);
    assert_eq!(plugin.script.lock().unwrap().allocated.len(), 1);

    let world = world.restart()?;
    assert_eq!(
        world.kubelet.run_options("default/pod", "main")?,
        first,
        "from the checkpoint"
    );
    assert_eq!(plugin.script.lock().unwrap().allocated.len(), 1);

    world.kubelet.remove("default/pod")?;
    assert!(world.kubelet.run_options("default/pod", "main").is_err());
    assert_eq!(world.restart()?.kubelet.pods().len(), 0);
    Ok(())
}

fn preference_is_asked_only_if_advertised() -> Result<()> {
    let options = DevicePluginOptions {
        get_preferred_allocation_available: true,
        ..DevicePluginOptions::default()
    };
    let preferred = ["c", "taken", "b"].map(str::to_owned).to_vec();
    let script = Script {
        options,
        preferred,
        ..Script::default()
    };
    let (world, plugin) = World::with_devices(script, &["a", "b", "c", "d"])?;
    world.kubelet.admit(Pod::with_limits("pod", &[(HCA, 2)])?)?;

    let key = ("main".to_owned(), HCA.to_owned());
    assert_eq!(world.kubelet.assigned("default/pod")?[&key], ["b", "c"]);
    let asked = plugin.script.lock().unwrap().asked_preference.clone();
    assert_eq!(asked.len(), 1);
    let container = &asked[0].container_requests[0];
    assert_eq!(container.allocation_size, 2);
    assert_eq!(container.available_device_i_ds.len(), 4);
    assert!(container.must_include_device_i_ds.is_empty());

    // What was preferred is taken now: any other will do.
    world
        .kubelet
        .admit(Pod::with_limits("other", &[(HCA, 2)])?)?;
    assert_eq!(world.kubelet.assigned("default/other")?[&key], ["a", "d"]);
    Ok(())
}

fn init_containers_devices_are_used_again() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a", "b", "c"])?;
    let init = vec![Container::with_limits("init", &[(HCA, 2)])];
    let app = vec![Container::with_limits("app", &[(HCA, 2)])];
    world.kubelet.admit(Pod::of_containers("pod", init, app)?)?;
    let assigned = world.kubelet.assigned("default/pod")?;
    let of = |container: &str| assigned[&(container.to_owned(), HCA.to_owned())].clone();
    assert_eq!(of("init"), of("app"));
    assert_eq!(world.kubelet.node()[HCA].in_use, 2);
    assert_eq!(
        plugin.script.lock().unwrap().allocated.len(),
        2,
        "the plugin is asked for each"
    );
    Ok(())
}

fn a_refused_allocate_leaves_nothing() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a"])?;
    plugin.script.lock().unwrap().refuse_allocate = Some("the HCA is gone".to_owned());
    let refused = world
        .kubelet
        .admit(Pod::with_limits("pod", &[(HCA, 1)])?)
        .unwrap_err();
    let text = refused.to_string();
    assert!(
        text.contains("UnexpectedAdmissionError") && text.contains("the HCA is gone"),
        "{text}"
    );
    assert_eq!(world.kubelet.node()[HCA].in_use, 0);
    assert!(world.kubelet.pods().is_empty());

    plugin.script.lock().unwrap().refuse_allocate = None;
    Ok(world.kubelet.admit(Pod::with_limits("pod", &[(HCA, 1)])?)?)
}

fn a_pod_that_does_not_fit_stays_pending() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a", "b"])?;
    world.kubelet.admit(Pod::with_limits("one", &[(HCA, 1)])?)?;
    let refused = world
        .kubelet
        .admit(Pod::with_limits("two", &[(HCA, 2)])?)
        .unwrap_err();
    assert!(
        matches!(
            refused,
            NotAdmitted::Unschedulable {
                wanted: 2,
                free: 1,
                ..
            }
        ),
        "{refused}"
    );
    assert_eq!(plugin.script.lock().unwrap().allocated.len(), 1);
    world.kubelet.remove("default/one")?;
    Ok(world.kubelet.admit(Pod::with_limits("two", &[(HCA, 2)])?)?)
}

fn after_a_reboot_a_pod_fails_until_its_plugin_is_back() -> Result<()> {
    let (world, plugin) = World::with_devices(Script::default(), &["a"])?;
    world.kubelet.admit(Pod::with_limits("pod", &[(HCA, 1)])?)?;
    drop(plugin);
    let world = world.restart()?;
    let failed = format!("{:#}", world.kubelet.readmit("default/pod").unwrap_err());
    assert!(failed.contains("no healthy devices present"), "{failed}");
    Ok(())
}

fn pre_start_is_called_each_time_if_asked_for() -> Result<()> {
    let options = DevicePluginOptions {
        pre_start_required: true,
        ..Default::default()
    };
    let (world, plugin) = World::with_devices(
        Script {
            options,
            ..Script::default()
        },
        &["a"],
    )?;
    world.kubelet.admit(Pod::with_limits("pod", &[(HCA, 1)])?)?;
    world.kubelet.run_options("default/pod", "main")?;
    world.kubelet.run_options("default/pod", "main")?;
    assert_eq!(plugin.script.lock().unwrap().pre_started, [["a"], ["a"]]);
    Ok(())
}

fn pod_resources_has_an_entry_for_each_device() -> Result<()> {
    let on = |id: &str, nodes: &[i64]| {
        let nodes = nodes.iter().map(|&id| NumaNode { id }).collect();
        Device {
            topology: Some(TopologyInfo { nodes }),
            ..healthy(id)
        }
    };
    let world = World::new()?;
    let plugin = world.plugin(Script::default())?;
    plugin.list(vec![
        healthy("none"),
        on("zero", &[0]),
        on("both", &[0, 1]),
        on("empty", &[]),
    ]);
    plugin.register(HCA)?;
    world.kubelet.wait_allocatable(HCA, 4, WAIT_TIMEOUT)?;
    world.kubelet.admit(Pod::with_limits("pod", &[(HCA, 4)])?)?;

    let client = Client::connect(&world.kubelet.pod_resources_socket())?;
    let mut lister = PodResourcesListerClient::new(client.channel.clone());
    let list = client
        .runtime
        .block_on(lister.list(ListPodResourcesRequest {}))?
        .into_inner();
    let container = &list.pod_resources[0].containers[0];
    let mut entries: Vec<_> = container
        .devices
        .iter()
        .map(|entry| (entry.device_ids.join(","), entry.topology.is_some()))
        .collect();
    entries.sort();
    let expected = [
        ("both", true),
        ("both", true),
        ("empty", false),
        ("none", false),
        ("zero", true),
    ];
    assert_eq!(
        entries,
        expected.map(|(id, topology)| (id.to_owned(), topology))
    );

    let asked = AllocatableResourcesRequest {};
    let allocatable = client
        .runtime
        .block_on(lister.get_allocatable_resources(asked))?;
    let mut ids: Vec<_> = allocatable
        .into_inner()
        .devices
        .into_iter()
        .flat_map(|entry| entry.device_ids)
        .collect();
    ids.sort();
    assert_eq!(
        ids,
        ["both", "both", "none", "zero"],
        "a topology without nodes hides its device"
    );

    let get = |name: &str| GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "default".to_owned(),
    };
    let pod = client
        .runtime
        .block_on(lister.get(get("pod")))?
        .into_inner();
    assert_eq!(
        pod.pod_resources.unwrap().containers,
        list.pod_resources[0].containers
    );
    let missing = client
        .runtime
        .block_on(lister.get(get("other")))
        .unwrap_err();
    assert_eq!(missing.code(), Code::Unknown);
    Ok(())
}

fn misbehaves_on_request() -> Result<()> {
    let world = World::new()?;
    let plugin = world.plugin(Script::default())?;
    plugin.list_healthy(&["a"]);
    world.kubelet.misbehave(Misbehaviour {
        refuse: 2,
        ..Misbehaviour::default()
    });
    assert!(plugin.register(HCA).is_err());
    assert!(plugin.register(HCA).is_err());
    world.kubelet.misbehave(Misbehaviour {
        never_watch: true,
        ..Misbehaviour::default()
    });
    plugin.register(HCA)?;
    std::thread::sleep(Duration::from_millis(300));
    assert!(world.kubelet.node().is_empty());
    world.kubelet.misbehave(Misbehaviour::default());
    plugin.register(HCA)?;
    world.kubelet.wait_allocatable(HCA, 1, WAIT_TIMEOUT)?;
    assert_eq!(world.kubelet.registrations().len(), 4);
    world.kubelet.disconnect(HCA);
    world.kubelet.wait_allocatable(HCA, 0, WAIT_TIMEOUT)
}
