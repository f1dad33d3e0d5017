"""Every private name of another package that this tree uses: where it lives, what it is for, what would do without it.

``test_private_names.py`` finds the uses in the sources, fails for one that is not here, and for one here that the
installed release does not have as it is used. A new row needs an answer to "what else?": a public name that is worse,
a feature that is then refused, or nothing at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrivateNames:
    """Names of one class or module that serve one purpose.

    Attributes:
        home: ``module`` or ``module:attribute.attribute`` that has them.
        names: what is used of it.
        why: what for.
        instead: what there is without them.
        elsewhere: what is used of other supported releases, and the installed one need not have.
        takes: by name, the parameters that are passed by keyword, or counted on.
    """

    home: str
    names: tuple[str, ...]
    why: str
    instead: str
    elsewhere: tuple[str, ...] = ()
    takes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


_RAY = (
    PrivateNames(
        home="ray.experimental.internal_kv",
        names=("_internal_kv_put", "_internal_kv_get", "_internal_kv_del", "_internal_kv_list"),
        why="notes of controllers and of the allocator outlive their processes, with Redis also the head's",
        instead="a detached actor, which is lost with its node; no public key-value store",
        takes={
            "_internal_kv_put": ("key", "value", "overwrite", "namespace"),
            "_internal_kv_get": ("key", "namespace"),
            "_internal_kv_del": ("key", "del_by_prefix", "namespace"),
            "_internal_kv_list": ("prefix", "namespace"),
        },
    ),
    PrivateNames(
        home="ray._private.state:GlobalState",
        names=("available_resources_per_node", "get_draining_nodes", "node_table", "actor_table"),
        why="what is free on each node, which nodes drain, whether an actor is dead for good",
        instead="ray.nodes(), without what is free, and ray.util.state, which needs Ray's dashboard",
    ),
    PrivateNames(
        home="ray._private", names=("state", "worker", "authentication"), why="see the rows of each", instead="-"
    ),
    PrivateNames(
        home="ray._private.worker",
        names=("print_to_stdstream",),
        why="raylets' accounts of lost workers stay out of the driver's output",
        instead="they are printed",
    ),
    PrivateNames(
        home="ray._private.worker",
        names=("_global_node",),
        why="this node's session folder: locks between its processes, Grafana's folder, what processes print",
        instead="RAY_TMPDIR, which is not set on every cluster",
    ),
    PrivateNames(home="ray", names=("_private",), why="see the rows of each", instead="-"),
    PrivateNames(
        home="ray._private.services",
        names=("canonicalize_bootstrap_address",),
        why="whether a cluster is announced on this machine, as ray.init() finds it",
        instead="the address that the user gives",
    ),
    PrivateNames(
        home="ray._private.ray_constants",
        names=("DEBUG_AUTOSCALING_STATUS",),
        why="what Ray's autoscaler may still start, to refuse what no node will ever hold",
        instead="waiting, as it does where the report is missing",
    ),
    PrivateNames(
        home="ray._private.authentication.authentication_utils",
        names=("is_token_auth_enabled",),
        why="whether the cluster asks for a token",
        instead="RAY_AUTH_MODE, which a running cluster need not agree with",
    ),
    PrivateNames(
        home="ray._raylet",
        names=("AuthenticationTokenLoader", "GcsClient"),
        why="the token that Ray would send from here; draining a node whose cloud takes it away",
        instead="asking the user for the token; the `ray drain-node` command, a process of two seconds",
    ),
    PrivateNames(
        home="ray._common.tls_utils",
        names=("load_certs_from_env",),
        why="certificates of a cluster with TLS, for the page",
        instead="reading RAY_TLS_* here",
    ),
    PrivateNames(
        home="ray.actor:ActorClass",
        names=("_remote",),
        why="actors that a train function names are in the namespace of its own driver, in a process of any job",
        instead="asking users for namespace=...",
    ),
    PrivateNames(
        home="ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator",
        names=("ResourceRequestPriority",),
        why="nodes are asked for together with Ray Data and Ray Train, which would undo a call beside theirs",
        instead="ray.autoscaler.sdk.request_resources, as where no coordinator runs",
    ),
    PrivateNames(
        home="ray.data._internal", names=("progress",), why="its logger is told to be quiet", instead="lines in the log"
    ),
    PrivateNames(
        home="ray.data:Dataset",
        names=("_execute_to_iterator", "_logical_plan", "_meta_count"),
        why="blocks in an order that depends on the seed alone, and how many rows there are",
        instead="Dataset.iter_internal_ref_bundles() with an order of the cluster's chance: no sample-exact epochs",
    ),
    PrivateNames(
        home="ray.data.context:DataContext",
        names=("_execution_idx",),
        why="each epoch has another seed of files",
        instead="one order for all epochs",
    ),
    PrivateNames(
        home="ray.data._internal.execution.interfaces.execution_options:ExecutionOptions",
        names=("_set_exclude_resources",),
        why="Ray Data leaves the workers' room alone",
        instead="the whole cluster for Ray Data",
    ),
    PrivateNames(
        home="ray.data.datasource.file_based_datasource:FileBasedDatasource",
        names=("_shuffle",),
        why="shuffling of files with a seed",
        instead="refusing shuffle='files'",
    ),
    PrivateNames(
        home="ray.train.v2._internal.execution",
        names=("train_fn_utils",),
        why="ray.train.report and the others mean elastic_ray's in a worker",
        instead="elastic_ray.report; the docs say so",
    ),
    PrivateNames(
        home="ray.train.v2._internal.execution.train_fn_utils",
        names=("_train_fn_utils",),
        why="the same",
        instead="the same",
    ),
    PrivateNames(
        home="ray.train.v2.torch.train_loop_utils",
        names=("_WrappedDataLoader",),
        why="ray.train.torch.prepare_data_loader gives elastic_ray's loader",
        instead="elastic_ray.AdaptiveDataLoader",
    ),
    PrivateNames(
        home="ray.train._internal",
        names=("session",),
        why="ray.tune.report and get_checkpoint mean elastic_ray's in a trial's train function",
        instead="elastic_ray.report; the docs say so",
    ),
    PrivateNames(
        home="ray.train._internal.session",
        names=("_session",),
        why="the same",
        instead="the same",
    ),
    PrivateNames(
        home="ray.train._internal.session",
        names=("_TrainingResult",),
        why="a checkpoint that a trial has restored",
        instead="ray.tune.Checkpoint without its metrics",
    ),
    PrivateNames(
        home="ray.train._internal.storage",
        names=("StorageContext",),
        why="where a sweep's results are",
        instead="RunConfig.storage_path, which Tune changes",
    ),
    *(
        PrivateNames(
            home=f"ray.tune.schedulers.{home}",
            names=names,
            why="rungs and metric of a sweep's scheduler, by which the allocator weighs its trials",
            instead="tuning.elastic(promise=...), which says the same again",
        )
        for home, names in (
            ("async_hyperband:AsyncHyperBandScheduler", ("_max_t", "_reduction_factor", "_brackets", "_time_attr")),
            ("async_hyperband:_Bracket", ("_rungs",)),
            ("hyperband:HyperBandScheduler", ("_max_t_attr", "_eta", "_get_r0", "_s_max_1")),
            ("median_stopping_rule:MedianStoppingRule", ("_grace_period", "_metric", "_mode")),
            ("resource_changing_scheduler:ResourceChangingScheduler", ("_base_scheduler",)),
        )
    ),
    PrivateNames(
        home="ray.tune.execution.tune_controller:TuneController",
        names=(
            *("_maybe_add_actors", "_maybe_cache_trial_actor"),
            *("_stop_experiment_if_needed", "_should_stop_experiment", "_scheduler_alg"),
        ),
        why="a sweep claims its name; a kept actor gives up its workers at once; a sweep that was stopped ends",
        instead="two sweeps of a name mix; workers given back with the next trial; the sweep's next trial fails",
    ),
)

_TORCH = (
    PrivateNames(
        home="torch._C",
        names=(
            *("_current_graph_task_id", "_will_engine_execute_node", "_get_tracing_state", "_storage_Use_Count"),
            *("_disabled_torch_function_impl",),
        ),
        why="whether a backward pass runs and which nodes it will reach; who else holds a gradient's memory",
        instead="hooks at the loss, which users call themselves; copies",
    ),
    PrivateNames(
        home="torch._C._distributed_c10d",
        names=("_register_process_group", "_resolve_process_group", "_unregister_process_group"),
        why="sharded models' collectives find the group of the present generation by its name",
        instead="init_device_mesh, once a process: no live resize",
    ),
    PrivateNames(
        home="torch.distributed",
        names=("_Work",),
        why="a collective that is done at once",
        instead="torch.futures.Future, which process groups do not return",
    ),
    PrivateNames(
        home="torch.distributed:ProcessGroup",
        names=("_register_backend", "_set_default_backend", "_set_group_name"),
        why="torch looks for a name, and a backend by device, in the default group",
        instead="a default group of torch's own, which cannot change size",
    ),
    PrivateNames(
        home="torch.distributed:Backend",
        names=("_plugins",),
        why="the default group's backend is registered once a process",
        instead="a flag of our own",
    ),
    PrivateNames(
        home="torch.distributed.distributed_c10d",
        names=("_world",),
        why="ranks of the default group, which change with it",
        instead="get_process_group_ranks() of the group as it began",
    ),
    PrivateNames(
        home="torch.distributed:ProcessGroupGloo",
        names=("_Options", "_set_default_timeout", "_allgather_base", "_start_coalescing", "_end_coalescing"),
        why="a group of its own for each generation, with interfaces and time-outs",
        instead="init_process_group, one group a process: no live resize",
    ),
    PrivateNames(
        home="torch.distributed:ProcessGroupGloo._Options",
        names=("_timeout", "_devices", "_threads"),
        why="the same, and as many reductions at once as there are buckets on their way",
        instead="the same",
    ),
    PrivateNames(
        home="torch",
        names=(
            *(
                "_foreach_add",
                "_foreach_add_",
                "_foreach_addcmul_",
                "_foreach_copy_",
                "_foreach_mul",
                "_foreach_mul_",
                "_foreach_norm",
            ),
            *("_foreach_sub", "_foreach_sub_", "_foreach_reciprocal_", "_amp_foreach_non_finite_check_and_unscale_"),
            *("_foreach_div", "_foreach_sqrt", "_foreach_sqrt_", "_foreach_clamp_min_"),
        ),
        why="one kernel for all tensors of a bucket, as torch's own optimizers use them",
        instead="a loop over tensors",
    ),
    PrivateNames(
        home="torch:ops.aten",
        names=("_foreach_div_", "_foreach_zero_", "_local_scalar_dense", "_foreach_norm"),
        why="operations on sliced and sharded gradients are recognised and answered",
        instead="refusing clip_grad_norm_ and GradScaler there",
    ),
    PrivateNames(
        home="torch:Tensor",
        names=(
            *("_version", "_indices", "_values", "_nnz", "_make_wrapper_subclass"),
            *("_backward_hooks", "_post_accumulate_grad_hooks", "_base"),
        ),
        why="whether somebody has written to a gradient; rows of sparse ones; hooks that would see no gradient; of "
        "which batch a part is",
        instead="indices() and values() of coalesced gradients alone; comparing contents",
    ),
    PrivateNames(
        home="torch.nn.parallel:DistributedDataParallel",
        names=("_ddp_params_and_buffers_to_ignore",),
        why="parameters that a program has told torch's wrapper to leave to each rank",
        instead="they are kept equal on all ranks, and nothing says so",
    ),
    PrivateNames(
        home="torch.utils._pytree",
        names=("tree_flatten", "tree_unflatten"),
        why="the samples of a model's arguments and outputs, which run out of memory, whatever they lie in",
        instead="such a step ends the loop, and a job begins it anew",
    ),
    PrivateNames(
        home="torch.autograd:Variable",
        names=("_execution_engine",),
        why="a callback at the end of a backward pass",
        instead="counting parameters, which unused ones break",
    ),
    PrivateNames(
        home="torch:UntypedStorage", names=("_cdata",), why="who else holds a gradient's memory", instead="copies"
    ),
    PrivateNames(
        home="torch.nn:Module",
        names=(
            *("_parameters", "_buffers", "_forward_pre_hooks", "_load_state_dict_pre_hooks"),
            *("_save_to_state_dict", "_load_from_state_dict"),
        ),
        why="parameters by owner; state that a class adds to its state dict by itself",
        instead="named_parameters(recurse=False); state_dict() of everything",
    ),
    PrivateNames(
        home="torch.nn:Module",
        names=("_compiled_call_impl",),
        why="a module that is compiled in place runs no hooks of its layers: its noise is measured otherwise",
        instead="nothing: the layers would silently measure nothing",
    ),
    PrivateNames(
        home="torch._dynamo:OptimizedModule",
        names=("_orig_mod",),
        why="the same of a module that torch.compile has wrapped",
        instead="isinstance() of the same private class",
    ),
    PrivateNames(
        home="torch.nn.modules.batchnorm",
        names=("_BatchNorm", "_NormBase"),
        why="whether a model has batch statistics",
        instead="a list of its subclasses",
    ),
    PrivateNames(
        home="torch.optim:Optimizer",
        names=("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        why="the order among hooks of one optimizer",
        instead="register_step_pre_hook, always the last",
    ),
    PrivateNames(
        home="torch.optim.lr_scheduler:LRScheduler",
        names=("_wrapped_by_lr_sched",),
        why="an optimizer whose scheduler was not passed is refused",
        instead='"initial_lr" in its groups, which loops also set themselves',
    ),
    PrivateNames(
        home="torch.optim.lr_scheduler:SequentialLR",
        names=("_schedulers",),
        why="schedulers that are part of another one",
        instead="asking for the outer one",
    ),
    PrivateNames(
        home="torch.amp:GradScaler",
        names=("_scale", "_growth_tracker"),
        why="a joiner receives the loss scale without a wait for the GPU",
        instead="state_dict(), which waits",
    ),
    PrivateNames(
        home="torch.amp:GradScaler",
        names=("_unscale_grads_",),
        why="the workers of a unit agree on overflows",
        instead="refusing GradScaler in units",
    ),
    PrivateNames(
        home="torch.utils.data.dataloader",
        names=("_MultiProcessingDataLoaderIter",),
        why="a forked worker process lets other loaders' workers alone",
        instead='"can only test a child process" on the console, once for each',
    ),
    PrivateNames(
        home="torch.utils.data:RandomSampler",
        names=("_num_samples",),
        why="whether the user has set it",
        instead="num_samples, which is set always",
    ),
    PrivateNames(
        home="torch._utils",
        names=("ExceptionWrapper",),
        why="an error of a loader's worker process",
        instead="its text",
    ),
    PrivateNames(
        home="torch.utils._pytree",
        names=("tree_leaves", "tree_map_only"),
        why="tensors within arguments",
        instead="torch.utils.pytree, where a release has it",
    ),
    *(
        PrivateNames(home=home, names=(name,), why="fully_shard is refused where it has moved", instead="-")
        for home, name in (
            ("torch", "_prims_common"),
            ("torch._C", "_distributed_c10d"),
            ("torch.distributed.fsdp._fully_shard", "_fsdp_common"),
            ("torch.distributed.tensor", "_dtensor_spec"),
        )
    ),
    PrivateNames(
        home="torch._prims_common",
        names=("make_contiguous_strides_for",),
        why="strides of a whole parameter",
        instead="a tensor on meta",
    ),
    PrivateNames(
        home="torch.distributed.checkpoint.state_dict",
        names=(
            *("_get_model_state_dict", "_get_optim_state_dict", "_init_optim_state"),
            *("_load_model_state_dict", "_load_optim_state_dict"),
        ),
        why="its functions know of state that lies with several ranks, whenever programs have imported them",
        instead="model.state_dict() and optimizer.state_dict() alone; torch's functions give parts as the whole",
    ),
    PrivateNames(
        home="torch.distributed.checkpoint.filesystem",
        names=("_StorageInfo",),
        why="torch's own tools read our sharded checkpoints",
        instead="elastic_ray.checkpoints alone",
    ),
    PrivateNames(
        home="torch.distributed.device_mesh:DeviceMesh",
        names=("_dim_group_names", "_pg_registry"),
        why="a mesh on the group of the present generation",
        instead="no fully_shard under a live resize: refused by UnknownTorchError",
    ),
    PrivateNames(
        home="torch.distributed.tensor:DTensor",
        names=("_op_dispatcher", "_local_tensor", "_spec"),
        why="rows of sharded parameters move between ranks in place",
        instead="the same refusal",
    ),
    PrivateNames(
        home="torch.distributed.tensor._dispatch:OpDispatcher",
        names=(
            *("_custom_op_handlers", "_dispatch_get_local_results_slow_path"),
            "_propagate_op_sharding_dispatch_slow_path",
        ),
        why="norms of sharded gradients over the group of the present generation",
        instead="the same refusal",
    ),
    PrivateNames(
        home="torch.distributed.tensor._dtensor_spec", names=("DTensorSpec",), why="a resharded parameter", instead="-"
    ),
    PrivateNames(
        home="torch.distributed.fsdp._fully_shard._fsdp_common",
        names=("FSDPMeshInfo", "TrainingState"),
        why="the same",
        instead="-",
    ),
    PrivateNames(
        home="torch.distributed.fsdp:FSDPModule",
        names=("_get_fsdp_state",),
        why="units of a fully_shard model",
        instead="the same refusal",
    ),
    PrivateNames(
        home="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        names=(
            *("_state_ctx", "_comm_ctx", "_training_state", "_is_root", "_reset_iter_state"),
            *("_fsdp_param_groups", "_device_handle", "_modules_to_run_forward"),
        ),
        elsewhere=("_fsdp_param_group",),
        why="the same",
        instead="the same refusal",
    ),
    PrivateNames(
        home="torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
        names=("_all_reduce_hook", "_to_sharded", "_training_state"),
        why="the same",
        instead="the same refusal",
    ),
    PrivateNames(
        home="torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
        names=(
            *("_sharded_param_data", "_unsharded_param", "_orig_size", "_module_info", "_setattr_on_modules"),
            *("_sharding_spec", "_spmd_mesh", "_spmd_placements", "_shard_mesh"),
        ),
        elsewhere=("_sharding_spec_by_dtype",),
        why="the same",
        instead="the same refusal",
    ),
    PrivateNames(home="torch._ops:OpOverload", names=("_schema",), why="the name of an operation", instead="its text"),
    PrivateNames(
        home="torch.utils._python_dispatch",
        names=("TorchDispatchMode",),
        why="a count of floating-point operations that leaves torch.compile alone; documented all the same",
        instead="no MFU",
    ),
)

_LIGHTNING = (
    PrivateNames(
        home="lightning.fabric.strategies.strategy",
        names=("_BackwardSyncControl",),
        why="no_backward_sync of Fabric",
        instead="refusing it",
    ),
    PrivateNames(
        home="lightning.pytorch.trainer.setup",
        names=("_val_check_time_interval",),
        why="validation by time, which ranks must agree on",
        instead="refusing val_check_interval=timedelta(...)",
    ),
    PrivateNames(
        home="lightning.fabric.strategies:Strategy",
        names=("_err_msg_joint_setup_required",),
        why="the error for a model and an optimizer that must be set up together",
        instead="text of our own",
    ),
    PrivateNames(
        home="lightning.pytorch.loops.fetchers",
        names=("_DataFetcher", "_DataLoaderIterDataFetcher"),
        why="batches are fetched between two steps, where the group may change",
        instead="a loop of our own beside Lightning's",
    ),
    PrivateNames(
        home="lightning.pytorch.loops.fetchers:_DataFetcher",
        names=("_start_profiler", "_stop_profiler"),
        why="the same",
        instead="no times of fetching in its profiler",
    ),
    PrivateNames(home="lightning.pytorch.loops.fit_loop", names=("_FitLoop",), why="the same", instead="the same"),
    PrivateNames(
        home="lightning.pytorch.loops.fit_loop:_FitLoop",
        names=("_can_stop_early", "_data_fetcher", "_combined_loader"),
        why="where a run ends on all ranks alike, and where it is in its data",
        instead="the same",
    ),
    PrivateNames(home="lightning.pytorch.loops.loop", names=("_Loop",), why="the same", instead="the same"),
    PrivateNames(
        home="lightning.pytorch.loops.loop:_Loop",
        names=("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"),
        why="a joiner continues in the middle of an epoch",
        instead="the same",
    ),
    PrivateNames(home="lightning.pytorch.loops.progress", names=("_BaseProgress",), why="counters", instead="the same"),
    PrivateNames(
        home="lightning.pytorch.loops.training_epoch_loop",
        names=("_TrainingEpochLoop",),
        why="the same",
        instead="the same",
    ),
    PrivateNames(
        home="lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
        names=(
            *("_results", "_batches_that_stepped", "_should_check_val_fx", "_num_ready_batches_reached"),
            *("_should_accumulate", "_is_training_done"),
        ),
        why="the same, and what has been logged",
        instead="the same",
    ),
    PrivateNames(
        home="lightning.pytorch.trainer.call",
        names=("_call_callbacks_load_state_dict", "_call_callbacks_state_dict"),
        why="a joiner receives the callbacks' states",
        instead="a loop over trainer.callbacks",
    ),
    PrivateNames(
        home="lightning.pytorch.trainer.connectors.logger_connector.result",
        names=("_Metadata", "_ResultMetric", "_Sync"),
        why="a joiner receives what the epoch has logged so far",
        instead="means of an epoch without what was before the join",
    ),
    PrivateNames(
        home="lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector",
        names=("_callback_metrics", "_first_loop_iter"),
        why="the same, and the last value of each name",
        instead="the same",
    ),
    PrivateNames(
        home="lightning.pytorch:Trainer",
        names=("_accelerator_connector", "_logger_connector"),
        why="which arguments were given; validation by time",
        instead="refusing less by name",
    ),
    PrivateNames(
        home="lightning.pytorch.trainer.connectors.accelerator_connector:_AcceleratorConnector",
        names=("_layer_sync",),
        why="sync_batchnorm",
        instead="the same",
    ),
    PrivateNames(home="lightning.pytorch:LightningModule", names=("_trainer",), why="its trainer", instead="trainer"),
    PrivateNames(
        home="lightning.pytorch.strategies:Strategy",
        names=("_lightning_module",),
        why="the module beneath the wrapped model",
        instead="lightning_module, which may not be set",
    ),
    PrivateNames(
        home="lightning.pytorch.callbacks:ModelCheckpoint",
        names=("_defer_save_until_validation", "_last_checkpoint_saved", "_last_global_step_saved"),
        why="a joiner does not save what was saved",
        instead="a checkpoint twice",
    ),
    PrivateNames(
        home="lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
        names=("_get_monitor_value",),
        why="all ranks step a scheduler by the same value",
        instead="refusing ReduceLROnPlateau",
    ),
    PrivateNames(
        home="lightning.pytorch.callbacks.weight_averaging:WeightAveraging",
        names=("_average_model",),
        why="a joiner receives the averaged model",
        instead="refusing the callback",
    ),
    PrivateNames(
        home="torchmetrics:Metric",
        names=("_update_count", "_computed", "_defaults", "_copy_state_dict"),
        why="sums of metrics reach joiners and checkpoints",
        instead="state_dict() of persistent states, which are none by default",
    ),
)

_HUGGING_FACE = (
    PrivateNames(
        home="transformers:Trainer",
        names=(
            *("_inner_training_loop", "_prepare_for_training", "_init_training_state", "_finalize_training"),
            *("_save_checkpoint", "_maybe_log_save_evaluate", "_get_num_items_in_batch", "_clip_grad_norm"),
            *("_get_collator_with_removed_columns", "_get_train_sampler", "_remove_unused_columns"),
            *("_get_grad_norm", "_get_learning_rate", "_evaluate", "_get_output_dir", "_load_rng_state"),
            *("_track_num_input_tokens", "_train_batch_size", "_tr_loss", "_total_loss_scalar"),
            "_globalstep_last_logged",
        ),
        why="its loop, with a live group and our data loader",
        instead="a Trainer whose train() is a copy; the docs' plain loop",
    ),
    PrivateNames(
        home="accelerate:Accelerator",
        names=("_dataloaders",),
        why="what was prepared",
        instead="the same",
    ),
    PrivateNames(
        home="accelerate.state:GradientState",
        names=("_add_dataloader", "_remove_dataloader", "_set_sync_gradients"),
        why="accumulation at the end of a loader",
        instead="gradient_accumulation_steps=1",
    ),
    PrivateNames(
        home="accelerate.optimizer:AcceleratedOptimizer",
        names=("_optimizer_original_step_method", "_optimizer_patched_step_method"),
        why="the optimizer's own step again",
        instead="refusing a gradient scaler beside accelerate",
    ),
    PrivateNames(
        home="accelerate.accelerator",
        names=("_is_accelerate_prepared",),
        why="the mark of what was prepared",
        instead="preparing twice",
    ),
)

_OTHERS = (
    PrivateNames(
        home="nni.trial",
        names=("_experiment_id", "_trial_id", "_sequence_id", "_params"),
        why="nni.get_next_parameter() in a worker, which is no process of NNI's",
        instead="elastic_ray's own channel alone",
    ),
    PrivateNames(
        home="nni.experiment:Experiment", names=("_proc",), why="the manager's process is ended", instead="a leak"
    ),
    PrivateNames(
        home="nni.experiment.launcher",
        names=("_check_rest_server",),
        why="a manager that is slow to start is waited for",
        instead="an error on busy machines",
    ),
    PrivateNames(
        home="ray.air.integrations.mlflow:MLflowLoggerCallback",
        names=("_trial_runs",),
        why="a run continues after a controller's restart",
        instead="another run",
    ),
    PrivateNames(
        home="ray.air._internal.mlflow:_MLflowLoggerUtil",
        names=("_get_client",),
        why="which steps a run has",
        instead="steps twice",
    ),
    PrivateNames(
        home="ray.cloudpickle.cloudpickle",
        names=("_make_skeleton_class", "_make_skeleton_enum", "_make_function"),
        why="classes and functions of a script are one in all processes",
        instead="isinstance() that fails for what came from another process",
    ),
)

_STANDARD_LIBRARY = (
    PrivateNames(home="os", names=("_exit",), why="an end that no library can hold up", instead="public, in truth"),
    PrivateNames(home="sys", names=("_getframe",), why="who calls", instead="inspect.currentframe(), slower"),
    PrivateNames(home="argparse", names=("_ArgumentGroup",), why="an annotation", instead="Any"),
    PrivateNames(home="threading", names=("_DummyThread",), why="whether autograd's thread calls", instead="its name"),
    PrivateNames(
        home="multiprocessing.queues:Queue",
        names=("_on_queue_feeder_error",),
        why="an error of a loader's worker that does not pickle is reported",
        instead="a loader that hangs",
    ),
    PrivateNames(
        home="copyreg", names=("_reconstructor",), why="a pickle without __init__", instead="copyreg's own way"
    ),
)

PRIVATE_NAMES = (*_RAY, *_TORCH, *_LIGHTNING, *_HUGGING_FACE, *_OTHERS, *_STANDARD_LIBRARY)

NOT_PRIVATE = frozenset(
    {
        "_ELASTIC_RAY_COMPLETE",  # an environment variable of ours
        "_group_",  # part of Ray's resource names
        "_elastic_watch",  # ours, in an object of Tune
        "_mib",  # end of a metric's name
        "_extra_state",  # torch's public key in a state dict
        "_fields",  # a named tuple's
        "_value_",  # an enumeration's
    }
)
"""Strings and names that look like one and are none."""
