// An API server of Kubernetes for tests, without a cluster: custom resources and core/v1 Nodes.
//
// Both are served by Kubernetes' own packages (k8s.io/apiserver and k8s.io/apiextensions-apiserver)
// on etcd: create, optimistic concurrency, list, watch, bookmarks and expiry are those of a
// cluster. Not here, because they belong to kube-apiserver itself: every other core type, RBAC (a
// client certificate of the group system:masters or crowd may do everything, the latter within the
// limits of requests in flight, anybody else nothing),
// admission (a namespace need not exist), service account tokens and the list of groups at /apis.
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/trace/noop"
	crdserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/cmd/server/options"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/authorization/union"
	"k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/webhook"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/component-base/cli"
)

func main() {
	o := options.NewCustomResourceDefinitionsServerOptions(os.Stdout, os.Stderr)
	cmd := &cobra.Command{
		Use:          "api-server",
		Short:        "Serves custom resources and Nodes of Kubernetes, for tests",
		SilenceUsage: true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return o.ServerRunOptions.ComponentGlobalsRegistry.Set()
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), o)
		},
	}
	o.AddFlags(cmd.Flags())
	cmd.SetContext(genericapiserver.SetupSignalContext())
	os.Exit(cli.Run(cmd))
}

func run(ctx context.Context, o *options.CustomResourceDefinitionsServerOptions) error {
	standAlone(o)
	if err := o.Complete(); err != nil {
		return err
	}
	if err := o.Validate(); err != nil {
		return err
	}
	config, err := configOf(o)
	if err != nil {
		return err
	}
	server, err := config.Complete().New(genericapiserver.NewEmptyDelegate())
	if err != nil {
		return err
	}
	if err := installNodes(server.GenericAPIServer, *o.RecommendedOptions.Etcd); err != nil {
		return fmt.Errorf("install nodes: %w", err)
	}
	return server.GenericAPIServer.PrepareRun().RunWithContext(ctx)
}

// standAlone removes what asks another API server: there is none.
func standAlone(o *options.CustomResourceDefinitionsServerOptions) {
	o.RecommendedOptions.CoreAPI = nil
	o.RecommendedOptions.Admission = nil
	o.RecommendedOptions.Features.EnablePriorityAndFairness = false
	o.RecommendedOptions.Authentication.RemoteKubeConfigFileOptional = true
	o.RecommendedOptions.Authentication.SkipInClusterLookup = true
	o.RecommendedOptions.Authorization.RemoteKubeConfigFileOptional = true
}

// configOf is Config of the options, which insists on services of another API server.
func configOf(o *options.CustomResourceDefinitionsServerOptions) (*crdserver.Config, error) {
	secure := o.RecommendedOptions.SecureServing
	if err := secure.MaybeDefaultWithSelfSignedCerts("localhost", nil, []net.IP{net.IPv4(127, 0, 0, 1)}); err != nil {
		return nil, err
	}
	config := genericapiserver.NewRecommendedConfig(crdserver.Codecs)
	if err := o.ServerRunOptions.ApplyTo(&config.Config); err != nil {
		return nil, err
	}
	if err := o.RecommendedOptions.ApplyTo(config); err != nil {
		return nil, err
	}
	authorization := &config.Config.Authorization
	authorization.Authorizer = union.New(authorizerfactory.NewPrivilegedGroups("crowd"), authorization.Authorizer)
	if err := o.APIEnablement.ApplyTo(&config.Config, crdserver.DefaultAPIResourceConfigSource(), crdserver.Scheme); err != nil {
		return nil, err
	}
	namer := openapi.NewDefinitionNamer(crdserver.Scheme, clientscheme.Scheme)
	config.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(definitions, namer)
	etcd := *o.RecommendedOptions.Etcd
	return &crdserver.Config{
		GenericConfig: config,
		ExtraConfig: crdserver.ExtraConfig{
			CRDRESTOptionsGetter: options.NewCRDRESTOptionsGetter(etcd, config.ResourceTransformers, config.StorageObjectCountTracker),
			ServiceResolver:      webhook.NewDefaultServiceResolver(),
			AuthResolverWrapper:  webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil, config.LoopbackClientConfig, noop.NewTracerProvider()),
		},
	}, nil
}
