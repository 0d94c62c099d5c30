// CUPTI, by which torch's profiler would see what runs on a device: it says that it cannot start. The profiler goes on
// with what it sees of the host.
#include <cupti_result.h>

#define REFUSED(name) \
  extern "C" CUptiResult name(...) { return CUPTI_ERROR_NOT_INITIALIZED; }
REFUSED(cuptiActivityDisable)
REFUSED(cuptiActivityEnable)
REFUSED(cuptiActivityEnableCudaEventDeviceTimestamps)
REFUSED(cuptiActivityEnableDriverApi)
REFUSED(cuptiActivityEnableRuntimeApi)
REFUSED(cuptiActivityFlushAll)
REFUSED(cuptiActivityGetNextRecord)
REFUSED(cuptiActivityPopExternalCorrelationId)
REFUSED(cuptiActivityPushExternalCorrelationId)
REFUSED(cuptiActivityRegisterCallbacks)
REFUSED(cuptiActivityRegisterTimestampCallback)
REFUSED(cuptiActivitySetAttribute)
REFUSED(cuptiEnableCallback)
REFUSED(cuptiEnableDomain)
REFUSED(cuptiFinalize)
REFUSED(cuptiGetCallbackName)
REFUSED(cuptiGetVersion)
REFUSED(cuptiSubscribe)
REFUSED(cuptiUnsubscribe)

extern "C" CUptiResult cuptiActivityGetNumDroppedRecords(void*, unsigned, unsigned long* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}
extern "C" CUptiResult cuptiGetResultString(CUptiResult, const char** text) {
  *text = "software GPUs have no CUPTI";
  return CUPTI_SUCCESS;
}
