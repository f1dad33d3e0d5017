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

// NNI 3.0 notes that an assessor has stopped a trial when the trial has ended, which is too late to show it as stopped.
const load = Module._load;
Module._load = function (request, ...rest) {
  const loaded = load.call(this, request, ...rest);
  if (request.endsWith('training_service/v3/compat')) {
    Module._load = load;
    const cancel = loaded.V3asV1.prototype.cancelTrialJob;
    loaded.V3asV1.prototype.cancelTrialJob = function (id, isEarlyStopped) {
      if (this.trialJobs[id] !== undefined) this.trialJobs[id].isEarlyStopped = Boolean(isEarlyStopped);
      return cancel.call(this, id, isEarlyStopped);
    };
  }
  return loaded;
};
