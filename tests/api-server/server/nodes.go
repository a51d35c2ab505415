package main

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	crdopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

var (
	nodeScheme = runtime.NewScheme()
	nodeCodecs = serializer.NewCodecFactory(nodeScheme)
	nodes      = corev1.Resource("nodes")
)

// The internal Node is that of version 1: nothing is converted, as there is one version.
func init() {
	utilruntime.Must(corev1.AddToScheme(nodeScheme))
	internal := schema.GroupVersion{Version: runtime.APIVersionInternal}
	nodeScheme.AddKnownTypes(internal, &corev1.Node{}, &corev1.NodeList{})
	utilruntime.Must(nodeScheme.SetVersionPriority(corev1.SchemeGroupVersion))
}

// installNodes serves /api/v1/nodes and /api/v1/nodes/NAME/status.
func installNodes(server *genericapiserver.GenericAPIServer, etcd genericoptions.EtcdOptions) error {
	etcd.StorageConfig.Codec = nodeCodecs.LegacyCodec(corev1.SchemeGroupVersion)
	factory := &genericoptions.SimpleStorageFactory{StorageConfig: etcd.StorageConfig}
	main, err := newNodeStore(etcd.CreateRESTOptionsGetter(factory, nil))
	if err != nil {
		return err
	}
	// The same store: another one would have a watch cache of its own.
	status := *main
	status.UpdateStrategy = statusStrategy{}
	status.ResetFieldsStrategy = statusStrategy{}
	group := genericapiserver.NewDefaultAPIGroupInfo(corev1.GroupName, nodeScheme, metav1.ParameterCodec, nodeCodecs)
	group.VersionedResourcesStorageMap["v1"] = map[string]rest.Storage{
		"nodes":        main,
		"nodes/status": &statusREST{&status},
	}
	return server.InstallLegacyAPIGroup(genericapiserver.DefaultLegacyAPIPrefix, &group)
}

func newNodeStore(getter generic.RESTOptionsGetter) (*registry.Store, error) {
	store := &registry.Store{
		NewFunc:                   func() runtime.Object { return &corev1.Node{} },
		NewListFunc:               func() runtime.Object { return &corev1.NodeList{} },
		DefaultQualifiedResource:  nodes,
		SingularQualifiedResource: corev1.Resource("node"),
		CreateStrategy:            nodeStrategy{},
		UpdateStrategy:            nodeStrategy{},
		DeleteStrategy:            nodeStrategy{},
		ResetFieldsStrategy:       nodeStrategy{},
		TableConvertor:            rest.NewDefaultTableConvertor(nodes),
	}
	return store, store.CompleteWithOptions(&generic.StoreOptions{RESTOptions: getter})
}

// statusREST writes a node's status only.
type statusREST struct{ store *registry.Store }

func (r *statusREST) New() runtime.Object { return &corev1.Node{} }

// Destroy does nothing: the store belongs to the main resource.
func (r *statusREST) Destroy() {}

func (r *statusREST) Get(ctx context.Context, name string, o *metav1.GetOptions) (runtime.Object, error) {
	return r.store.Get(ctx, name, o)
}

func (r *statusREST) Update(ctx context.Context, name string, object rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, o *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return r.store.Update(ctx, name, object, create, update, false, o)
}

func (r *statusREST) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return r.store.GetResetFields()
}

func (r *statusREST) ConvertToTable(ctx context.Context, object, options runtime.Object) (*metav1.Table, error) {
	return r.store.ConvertToTable(ctx, object, options)
}

// nodeStrategy is pkg/registry/core/node/strategy.go of kube-apiserver, with its validation of
// name, metadata and taints.
type nodeStrategy struct{}

func (nodeStrategy) ObjectKinds(object runtime.Object) ([]schema.GroupVersionKind, bool, error) {
	return nodeScheme.ObjectKinds(object)
}
func (nodeStrategy) Recognizes(gvk schema.GroupVersionKind) bool { return nodeScheme.Recognizes(gvk) }
func (nodeStrategy) GenerateName(base string) string {
	return names.SimpleNameGenerator.GenerateName(base)
}
func (nodeStrategy) NamespaceScoped() bool                                     { return false }
func (nodeStrategy) AllowCreateOnUpdate() bool                                 { return false }
func (nodeStrategy) AllowUnconditionalUpdate() bool                            { return true }
func (nodeStrategy) Canonicalize(runtime.Object)                               {}
func (nodeStrategy) PrepareForCreate(context.Context, runtime.Object)          {}
func (nodeStrategy) WarningsOnCreate(context.Context, runtime.Object) []string { return nil }
func (nodeStrategy) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}
func (nodeStrategy) PrepareForUpdate(_ context.Context, object, old runtime.Object) {
	object.(*corev1.Node).Status = old.(*corev1.Node).Status
}
func (nodeStrategy) Validate(_ context.Context, object runtime.Object) field.ErrorList {
	return validate(object.(*corev1.Node))
}
func (nodeStrategy) ValidateUpdate(_ context.Context, object, old runtime.Object) field.ErrorList {
	node := object.(*corev1.Node)
	metadata := field.NewPath("metadata")
	errors := validation.ValidateObjectMetaUpdate(&node.ObjectMeta, &old.(*corev1.Node).ObjectMeta, metadata)
	return append(errors, validate(node)...)
}
func (nodeStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return reset("status")
}

// statusStrategy keeps everything but the status.
type statusStrategy struct{ nodeStrategy }

func (statusStrategy) PrepareForUpdate(_ context.Context, object, old runtime.Object) {
	object.(*corev1.Node).Spec = old.(*corev1.Node).Spec
}
func (statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return reset("spec")
}

func reset(part string) map[fieldpath.APIVersion]*fieldpath.Set {
	return map[fieldpath.APIVersion]*fieldpath.Set{"v1": fieldpath.NewSet(fieldpath.MakePathOrDie(part))}
}

func validate(node *corev1.Node) field.ErrorList {
	errors := validation.ValidateObjectMeta(&node.ObjectMeta, false, validation.NameIsDNSSubdomain, field.NewPath("metadata"))
	type identity struct {
		key    string
		effect corev1.TaintEffect
	}
	seen := map[identity]bool{}
	for i, taint := range node.Spec.Taints {
		path := field.NewPath("spec", "taints").Index(i)
		errors = append(errors, metav1validation.ValidateLabelName(taint.Key, path.Child("key"))...)
		switch taint.Effect {
		case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		default:
			errors = append(errors, field.NotSupported(path.Child("effect"), taint.Effect, []corev1.TaintEffect{
				corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute,
			}))
		}
		one := identity{taint.Key, taint.Effect}
		if seen[one] {
			errors = append(errors, field.Duplicate(path, taint))
		}
		seen[one] = true
	}
	return errors
}

// definitions describes a Node as far as server-side apply needs it: what its metadata is. The
// generated description of core types is not among the libraries.
func definitions(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	all := crdopenapi.GetOpenAPIDefinitions(ref)
	text := spec.StringProperty()
	free := spec.Schema{SchemaProps: spec.SchemaProps{Type: []string{"object"}}}
	free.AddExtension("x-kubernetes-preserve-unknown-fields", true)
	object := func(properties map[string]spec.Schema, needs ...string) common.OpenAPIDefinition {
		properties["apiVersion"], properties["kind"] = *text, *text
		return common.OpenAPIDefinition{
			Schema: spec.Schema{SchemaProps: spec.SchemaProps{
				Type: []string{"object"}, Properties: properties,
			}},
			Dependencies: needs,
		}
	}
	reference := func(name string) spec.Schema {
		return spec.Schema{SchemaProps: spec.SchemaProps{Ref: ref(name)}}
	}
	node, meta, list := corev1.Node{}.OpenAPIModelName(), metav1.ObjectMeta{}.OpenAPIModelName(), metav1.ListMeta{}.OpenAPIModelName()
	item := reference(node)
	all[node] = object(map[string]spec.Schema{"metadata": reference(meta), "spec": free, "status": free}, meta)
	all[corev1.NodeList{}.OpenAPIModelName()] = object(map[string]spec.Schema{
		"metadata": reference(list), "items": *spec.ArrayProperty(&item),
	}, list, node)
	return all
}
