'use strict';
// Loaded into NNI's manager before its own code, by NODE_OPTIONS. Its server has no password and starts commands, so it
// is to listen where it is told to, and not to outlive the process that started it.
const Module = require('module');
const net = require('net');
const host = process.env.ELASTIC_RAY_NNI_HOST;
delete process.env.NODE_OPTIONS; // not for what trials run

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (...args) {
  const onlyPort = (typeof args[0] === 'number' || /^\d+$/.test(args[0])) && typeof args[1] !== 'string';
  if (onlyPort) args.splice(1, 0, host);
  return listen.apply(this, args);
};

const parent = process.ppid;
setInterval(() => {
  if (process.ppid !== parent) process.kill(process.pid, 'SIGTERM');
}, 500).unref();

const patches = {
  // NNI 3.0 notes that an assessor has stopped a trial when the trial has ended, too late to show it as stopped.
  'training_service/v3/compat': ({ V3asV1 }) => {
    const cancel = V3asV1.prototype.cancelTrialJob;
    V3asV1.prototype.cancelTrialJob = function (id, isEarlyStopped) {
      if (this.trialJobs[id] !== undefined) this.trialJobs[id].isEarlyStopped = Boolean(isEarlyStopped);
      return cancel.call(this, id, isEarlyStopped);
    };
  },
  // It gives up a tuner that has not connected after 10 s, which on a busy machine is about what its imports take.
  // Whoever started this looks whether the tuner's process is there.
  '/tuner_command_channel': ({ getTunerServer }) => {
    getTunerServer().init = function () {
      return this.connect.promise;
    };
  },
};

const load = Module._load;
Module._load = function (request, ...rest) {
  const loaded = load.call(this, request, ...rest);
  const name = Object.keys(patches).find((ending) => request.endsWith(ending));
  if (name !== undefined) {
    patches[name](loaded);
    delete patches[name];
  }
  return loaded;
};
